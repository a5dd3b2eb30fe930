"""The CPU runner. What it runs on depends on the machine and the model, best first:

the decoder, in C++       a compiler, and a model that rill.models.decode.structure can describe; with AVX-512
                          products too
the decoder, in torch     such a model without a compiler
the modules' own methods  everything else; attention and the head's product are still compiled where they can be
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rill.inference.native.model_runner import LoadedModel, ModelRunner
from rill.models.ops.cpu_kernels import CpuKernels, load_cpu_kernels
from rill.models.ops.invariant import invariant_linear
from rill.models.ops.torch_kernels import TorchKernels

if TYPE_CHECKING:
    from rill.inference.native.engine import NativeEngine


class CpuRunner(ModelRunner):
    def __init__(self, loaded: LoadedModel, config: NativeEngine.Config) -> None:
        super().__init__(loaded, config)
        kernels = load_cpu_kernels()
        widest = max(dim for _, dim in self.cache_shape.layers)
        if kernels is not None and not CpuKernels.supports(self.model.dtype, widest):
            kernels = None
        self._cpu_kernels = kernels
        fast_path = config.fast_path and not (self.batch_invariant and kernels is None)
        self.use_kernels(kernels or TorchKernels(), fast_path=fast_path)

    def enter_thread(self) -> None:
        super().enter_thread()
        if self.shards is not None:  # the ranks share the cores
            torch.set_num_threads(max(1, torch.get_num_threads() // self.shards.group.size))
        if self._cpu_kernels is not None:
            self._cpu_kernels.num_threads = torch.get_num_threads()

    def logits(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        weight, bias = self.head.weight, self.head.bias
        if self.batch_invariant:
            return self.logit_rule(invariant_linear(hidden_SE, weight, bias)).float()
        if self._cpu_kernels is not None and type(self.head) is torch.nn.Linear:
            return self.logit_rule(self._cpu_kernels.linear(hidden_SE, weight, bias)).float()
        return super().logits(hidden_SE)
