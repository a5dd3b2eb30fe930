"""The CPU runner. What it runs on depends on the machine and the model, best first:

the decoder, in C++       a compiler, and a model that rill.models.decode.structure can describe; with AVX-512
                          products too
the decoder, in torch     such a model without a compiler
the modules' own methods  everything else; attention and sampling are still compiled where they can be
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rill.errors import UnsupportedError
from rill.inference.native.batch import StepBatch
from rill.inference.native.logit_edits import apply_edits
from rill.inference.native.model_runner import ModelRunner
from rill.inference.native.sampler import resample_masked
from rill.models.decode.shards import Shards
from rill.models.eager import Probe
from rill.models.ops.cpu_kernels import CpuKernels, load_cpu_kernels
from rill.models.ops.invariant import invariant_linear
from rill.models.ops.torch_kernels import TorchKernels

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CpuRunner(ModelRunner):
    def __init__(
        self,
        model: PreTrainedModel,
        probe: Probe,
        *,
        block_size: int,
        max_len: int,
        fast_path: bool,
        fuse: bool,
        batch_invariant: bool,
        shards: Shards | None = None,
    ) -> None:
        super().__init__(model, probe, device=torch.device("cpu"), block_size=block_size, shards=shards)
        self.batch_invariant = batch_invariant
        kernels = load_cpu_kernels()
        if kernels is not None and not CpuKernels.supports(model.dtype, self.cache_shape.head_dim):
            kernels = None
        self._cpu_kernels = kernels
        ops = kernels or TorchKernels()
        self.kernels = ops
        if fast_path and not (batch_invariant and kernels is None):
            linear = invariant_linear if batch_invariant else None
            self.decoder = self.build_decoder(ops, fuse=fuse, max_len=max_len, linear=linear)
        if batch_invariant and self.decoder is None:
            self.use_modules()

    def use_modules(self) -> None:
        super().use_modules()
        if self.batch_invariant:
            raise UnsupportedError(
                f"batch_invariant needs the fast path, which {self.model.config.model_type!r} in {self.model.dtype} "
                "does not have here (it also needs a C++ compiler): set batch_invariant=false"
            )

    def enter_thread(self) -> None:
        super().enter_thread()
        if self.shards is not None:  # the ranks share the cores
            torch.set_num_threads(max(1, torch.get_num_threads() // self.shards.group.size))
        if self._cpu_kernels is not None:
            self._cpu_kernels.num_threads = torch.get_num_threads()

    def logits(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        """In the model's own precision, which the kernels read as it is, unless something is left to compute."""
        weight, bias = self.head.weight, self.head.bias
        if self.batch_invariant:
            return self.logit_rule(invariant_linear(hidden_SE, weight, bias))
        if self._cpu_kernels is not None and type(self.head) is torch.nn.Linear:
            return self.logit_rule(self._cpu_kernels.linear(hidden_SE, weight, bias))
        return super().logits(hidden_SE)

    def sample(self, logits_SV: torch.Tensor, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        sampling = batch.sampling
        kernels = self._cpu_kernels
        if kernels is None:
            return super().sample(logits_SV, batch)
        if sampling.edits:
            logits_SV = logits_SV.float()
            apply_edits(logits_SV, sampling.edits)
        filters = None
        if sampling.is_filtered:
            filters = (
                torch.from_numpy(sampling.top_k_S),
                torch.from_numpy(sampling.top_p_S),
                torch.from_numpy(sampling.min_p_S),
            )
        temperature_S, uniform_S = (
            torch.from_numpy(sampling.temperature_S),
            torch.from_numpy(sampling.uniform_S),
        )
        tokens_S, logprobs_S = kernels.sample(logits_SV, temperature_S, uniform_S, filters=filters)
        resample_masked(logits_SV, sampling, tokens_S, logprobs_S)
        return tokens_S, logprobs_S

    def score_rows(
        self, logits_SV: torch.Tensor, targets_S: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        if self._cpu_kernels is None:
            return super().score_rows(logits_SV, targets_S, temperature)
        return self._cpu_kernels.score(logits_SV, targets_S, torch.full((len(targets_S),), temperature))
