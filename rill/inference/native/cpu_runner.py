"""The CPU runner. What it runs on depends on the machine and the model, best first:

a whole step in one call      AVX-512 (and AMX for bfloat16), a compiler, an architecture that decoder.py knows
a kernel per stage            a compiler and such an architecture; torch's products in between
the modules' own methods      everything else; attention and sampling are still compiled where they can be
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from rill.errors import UnsupportedError
from rill.inference.native.batch import ScoredRows, StepBatch
from rill.inference.native.model_runner import SCORE_ROWS, ModelRunner
from rill.inference.native.sampler import apply_edits
from rill.models.decode.decoder import build_decoder
from rill.models.ops.cpu_build import load_libraries
from rill.models.ops.cpu_decoder import FusedDecoder, FusedKernels, load_fused_kernels
from rill.models.ops.cpu_kernels import CpuKernels, load_cpu_kernels
from rill.models.ops.invariant import invariant_linear
from rill.types import Floats

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CpuRunner(ModelRunner):
    def __init__(
        self,
        model: PreTrainedModel,
        *,
        block_size: int,
        max_len: int,
        fast_path: bool,
        fuse: bool,
        batch_invariant: bool,
    ) -> None:
        super().__init__(model, device=torch.device("cpu"), block_size=block_size)
        self.batch_invariant = batch_invariant
        load_libraries(
            "cpu_kernels", "cpu_decoder"
        )  # the first time each is compiled: not one after the other
        kernels = load_cpu_kernels()
        if kernels is not None and not CpuKernels.supports(model.dtype, self.cache_shape.head_dim):
            kernels = None
        self._cpu_kernels = kernels
        self._fused: FusedKernels | None = None
        self._fused_decoder: FusedDecoder | None = None
        if kernels is not None:
            self.kernels = kernels
            if fast_path:
                self._choose_decoder(kernels, max_len=max_len, fuse=fuse)
        if batch_invariant and self.decoder is None:
            raise UnsupportedError(
                f"batch_invariant needs the fast path, which {model.config.model_type!r} in {model.dtype} does not "
                "have here (it also needs a C++ compiler): set batch_invariant=false"
            )

    def _choose_decoder(self, kernels: CpuKernels, *, max_len: int, fuse: bool) -> None:
        fused = load_fused_kernels()
        if fused is not None and fused.supports(self.model.dtype):
            self._fused = fused
            self.decoder = self._fused_decoder = fused.decoder(self.model, max_len=max_len)
        if self.decoder is None:
            linear = invariant_linear if self.batch_invariant else torch.nn.functional.linear
            self.decoder = build_decoder(self.model, kernels, fuse=fuse, max_len=max_len, linear=linear)

    def finish_update(self) -> None:
        if self._fused_decoder is not None:
            self._fused_decoder.rebind()  # an owner may have moved its parameters, not only changed them

    def enter_thread(self) -> None:
        super().enter_thread()
        if self._cpu_kernels is not None:
            self._cpu_kernels.num_threads = torch.get_num_threads()

    def logits(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        """In the model's own precision, which the kernels read as it is, unless something is left to compute."""
        if self._fused is not None:
            logits_SV = self._fused.linear(hidden_SE, self.head.weight, self.head.bias)
        elif self.batch_invariant:
            logits_SV = invariant_linear(hidden_SE, self.head.weight)
        else:
            return super().logits(hidden_SE)
        if self.logit_softcap:
            logits_SV = torch.tanh(logits_SV.float() / self.logit_softcap) * self.logit_softcap
        return logits_SV

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
        return kernels.sample(logits_SV, temperature_S, uniform_S, filters=filters)

    def score(self, hidden_NE: torch.Tensor, scored: ScoredRows) -> Floats:
        if self._cpu_kernels is None:
            return super().score(hidden_NE, scored)
        parts: list[Floats] = []
        for start in range(0, len(scored.rows), SCORE_ROWS):
            rows = torch.from_numpy(scored.rows[start : start + SCORE_ROWS])
            targets = torch.from_numpy(scored.targets[start : start + SCORE_ROWS])
            logits_SV = self.logits(hidden_NE[rows])
            temperature_S = torch.full((len(targets),), scored.temperature)
            parts.append(self._cpu_kernels.score(logits_SV, targets, temperature_S).numpy())
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)
