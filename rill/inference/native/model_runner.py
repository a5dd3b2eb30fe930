"""Runs one step of the model: a flat batch in, sampled tokens and scores out.

The base class is the CPU runner and the reference for others. It owns the model's modules, the KV cache tensors
and the way from hidden states to tokens; the scheduler's decisions and the sequences' states are not its business.
`launch` starts a step and returns at once where the device allows it; `PendingStep.result` waits for its numbers.

The modules are Hugging Face's own. Where the architecture is one that `decoder.py` knows, the same parameters are
run through that shorter path instead of the modules' forward methods.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from rill.errors import ModelError
from rill.inference.native.adapters import AdapterStore
from rill.inference.native.batch import ScoredRows, StepBatch
from rill.inference.native.sampler import sample
from rill.models.decode.attention_paged import (
    KVCache,
    PagedBatch,
    PagedContext,
    PagedKernels,
    TorchKernels,
    paged_context,
)
from rill.models.decode.decoder import FastPath
from rill.types import Floats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SUPPORTED = frozenset(
    {"qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "gemma", "gemma2", "gpt2"},
)
"""model_type values whose greedy output is tested against transformers' own."""

SCORE_ROWS = 512
"""Rows whose logits exist at one time while scoring: rows x vocabulary fp32 is the peak memory."""


@dataclass(frozen=True, slots=True)
class StepResult:
    tokens_S: list[int]
    logprobs_S: list[float]
    scores: list[Floats]
    """One array per ScoredRows of the batch."""


class PendingStep(Protocol):
    def result(self) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class DoneStep:
    value: StepResult

    def result(self) -> StepResult:
        return self.value


@dataclass(frozen=True, slots=True)
class CacheShape:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int

    @property
    def block_bytes(self) -> int:
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return per_token * self.block_size


class ModelRunner:
    uses_graphs = False
    is_overlapped = False
    """Whether launch() returns before the step is done, so that the next may be prepared meanwhile."""
    usual_num_slots = 256

    def __init__(self, model: PreTrainedModel, *, device: torch.device, block_size: int) -> None:
        config = model.config
        if config.model_type not in SUPPORTED:
            raise ModelError(
                f"the native engine does not run model_type {config.model_type!r}: it has been checked for "
                f"{', '.join(sorted(SUPPORTED))}; use the vllm or sglang engine for others"
            )
        self.model = model
        self.device = device
        self.head: Any = model.get_output_embeddings()
        self.backbone: Any = model.base_model
        values = config.to_dict()  # an architecture that lacks a feature lacks its key
        self.logit_softcap: float = values.get("final_logit_softcapping") or 0.0
        head_dim = values.get("head_dim") or config.hidden_size // config.num_attention_heads
        num_kv_heads = values.get("num_key_value_heads") or config.num_attention_heads
        self.cache_shape = CacheShape(
            config.num_hidden_layers, num_kv_heads, head_dim, model.dtype, block_size
        )
        self.cache = KVCache()
        self.kernels: PagedKernels = TorchKernels()
        self.decoder: FastPath | None = None
        self.adapters = AdapterStore(model)

    @classmethod
    def num_slots(cls, configured: int | None) -> int:
        """Sequences that may run at one time."""
        return cls.usual_num_slots if configured is None else configured

    def allocate_cache(self, num_blocks: int) -> None:
        shape = self.cache_shape
        size = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        # Zeros, not garbage: a masked score of NaN is still NaN, so unwritten slots must be finite.
        self.cache.keys = [self._zeros(size) for _ in range(shape.num_layers)]
        self.cache.values = [self._zeros(size) for _ in range(shape.num_layers)]

    def free_cache(self) -> None:
        self.cache.keys, self.cache.values = [], []

    def free_bytes(self) -> int:
        """Memory that a KV cache could take now."""
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def prepare(self) -> None:
        """Whatever is worth doing once before the first step, in the thread that will launch it."""

    def offload_weights(self) -> None:
        """Host memory is where CPU weights live already: there is nothing to give back."""

    def reload_weights(self) -> None: ...

    def drop_graphs(self) -> None: ...

    def enter_thread(self) -> None:
        """Called once by the thread that will launch the steps."""
        torch.set_grad_enabled(False)

    def leave_thread(self) -> None:
        """Called once by that thread at its end."""

    def record_caller(self) -> object:
        """A mark after whatever the calling thread has queued on the device; see wait_for."""
        return None

    def wait_for(self, mark: object) -> None:
        """Steps and copies from here on come after the mark."""

    def wait_in_caller(self) -> None:
        """Work that the calling thread queues from here on comes after everything launched so far."""

    def finish_update(self) -> None:
        """Called after parameters were overwritten, before the next step."""

    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> PendingStep:
        hidden_NE = self.forward(batch)
        tokens: list[int] = []
        logprobs: list[float] = []
        if batch.sampled:
            rows = torch.from_numpy(batch.sampled_rows_S).to(self.device)
            tokens_S, logprobs_S = self.sample(self.logits(hidden_NE[rows]), batch)
            tokens, logprobs = tokens_S.tolist(), logprobs_S.tolist()
        scores = [self.score(hidden_NE, scored) for scored in batch.scored]
        return DoneStep(StepResult(tokens, logprobs, scores))

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Last hidden states [N, E], after the final norm."""
        paged = self.paged_batch(batch)
        ids = torch.from_numpy(batch.token_ids_N).to(self.device)
        positions = torch.from_numpy(batch.positions_N).to(self.device)
        if self.decoder is not None and not batch.adapters:
            return self.decoder(ids, positions, paged, self.cache)
        return self.module_forward(batch, paged, ids, positions)

    def module_forward(
        self, batch: StepBatch, paged: PagedBatch, ids_N: torch.Tensor, positions_N: torch.Tensor
    ) -> torch.Tensor:
        """Through the modules' own forward methods, with the batch's adapters."""
        context = PagedContext(paged, self.cache, self.kernels)
        with paged_context(context), self.adapters.active(batch.adapters, self.device):
            out = self.backbone(input_ids=ids_N[None], position_ids=positions_N[None], use_cache=False)
        hidden: torch.Tensor = out.last_hidden_state
        return hidden[0]

    def logits(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        logits_SV: torch.Tensor = self.head(hidden_SE).float()
        if self.logit_softcap:
            logits_SV = torch.tanh(logits_SV / self.logit_softcap) * self.logit_softcap
        return logits_SV

    def sample(self, logits_SV: torch.Tensor, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return sample(logits_SV, batch.sampling)

    def score(self, hidden_NE: torch.Tensor, scored: ScoredRows) -> Floats:
        """log p(target) of each row, a few rows at a time."""
        parts = []
        for start in range(0, len(scored.rows), SCORE_ROWS):
            rows = torch.from_numpy(scored.rows[start : start + SCORE_ROWS]).to(self.device)
            targets = torch.from_numpy(scored.targets[start : start + SCORE_ROWS]).to(self.device)
            logits_SV = self.logits(hidden_NE[rows])
            if scored.temperature not in (0.0, 1.0):
                logits_SV /= scored.temperature
            picked_S = logits_SV.gather(1, targets[:, None])[:, 0]
            parts.append((picked_S - logits_SV.logsumexp(dim=-1)).cpu().numpy())
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)

    def paged_batch(self, batch: StepBatch) -> PagedBatch:
        device = self.device
        return PagedBatch(
            slots_N=torch.from_numpy(batch.kv_slots_N).to(device),
            query_starts_B1=torch.from_numpy(batch.query_starts_B1).to(device),
            context_lens_B=torch.from_numpy(batch.context_lens_B).to(device),
            block_tables_BM=torch.from_numpy(batch.block_tables).to(device),
            num_decodes=batch.num_decodes,
            max_query_len=batch.max_query_len,
            max_context_len=batch.max_context_len,
        )

    def _zeros(self, size: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(size, dtype=self.cache_shape.dtype, device=self.device)
