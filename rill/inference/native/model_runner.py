"""Runs the steps of a turn: flat batches in, sampled tokens and scores out.

The base class is the reference for others. It owns the model's modules, the KV cache tensors and the way from hidden
states to tokens; the scheduler's decisions and the sequences' states are not its business. `launch` starts a turn and
returns at once where the device allows it; what it returns waits for the turn's numbers.

The modules are Hugging Face's own. Where rill.models.decode.structure can describe the model, the same parameters are
run through that shorter path instead of the modules' forward methods. self_check.py holds both against the modules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import psutil
import torch

from rill.errors import ModelError, UnsupportedError
from rill.inference.native.adapters import AdapterStore
from rill.inference.native.batch import StepBatch
from rill.inference.native.sampler import likeliest, sample
from rill.inference.native.scheduler import Chunk
from rill.inference.native.sequence import ScoredSequence
from rill.inference.native.weight_update import WeightTargets
from rill.models.decode.attention_paged import DecoderOps, LayerCache, PagedBatch, PagedContext
from rill.models.decode.decoder import Decoder
from rill.models.decode.quantized import Writer, quantize_stages, quantize_weights
from rill.models.decode.shards import Shards
from rill.models.decode.structure import read_structure
from rill.models.eager import LogitRule, Probe, decoder_of
from rill.models.ops.cpu_kernels import CpuKernels, load_cpu_kernels
from rill.models.ops.fp8 import FP8, multiplies_fp8
from rill.models.ops.invariant import invariant_linear
from rill.models.ops.torch_kernels import TorchKernels
from rill.models.routing import UNKNOWN, Routing
from rill.models.vision import VisionTower, VisualRows
from rill.types import Floats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rill.inference.native.engine import NativeEngine

logger = logging.getLogger(__name__)

SCORE_ROWS = 512
"""Rows whose logits exist at one time while scoring: rows x vocabulary fp32 is the peak memory."""
CGROUPS = Path("/sys/fs/cgroup")
_FILES = (
    ("memory.max", "memory.current"),  # control groups, version 2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # version 1
)


@dataclass(frozen=True, slots=True)
class TurnResult:
    """Of all steps K; a row that left the turn early has no meaning in the later ones."""

    tokens_KS: npt.NDArray[np.integer[Any]]
    logprobs_KS: Floats
    scores: list[Floats]
    """One array for each of the first step's `scored`."""
    top: tuple[npt.NDArray[np.integer[Any]], Floats] | None = None
    """Tokens and log-probabilities [S, num_top], the likeliest first: of a turn of one step, where a sequence asked."""


PendingTurn = Callable[[], TurnResult]


@dataclass(frozen=True, slots=True)
class CacheShape:
    layers: tuple[tuple[int, int], ...]
    """Key/value heads and their width, by layer; values narrower than keys are padded."""
    dtype: torch.dtype
    block_size: int

    @property
    def block_bytes(self) -> int:
        per_token = 2 * sum(heads * dim for heads, dim in self.layers) * self.dtype.itemsize
        return per_token * self.block_size


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a runner is made for."""

    model: PreTrainedModel
    probe: Probe
    device: torch.device
    max_len: int
    """Tokens of the longest sequence."""
    is_owned: bool
    """The parameters are the runner's own and may be moved together."""
    shards: Shards | None = None
    """What this rank holds of a model that several hold together; `probe` is of that part."""


class ModelRunner:
    uses_graphs = False
    is_overlapped = False
    """Whether launch() returns before the step is done, so that the next may be prepared meanwhile."""
    usual_num_slots = 256
    num_verified_rows = 16
    """Of a step that looks at drafts: so many cost little more than one."""
    layer_bytes = 1 << 20
    """What a layer takes beside reading its weights, in bytes read meanwhile."""
    round_bytes = 1 << 20
    """Likewise, what the host takes where two turns wait for each other."""

    def __init__(self, loaded: LoadedModel, config: NativeEngine.Config) -> None:
        self._loaded = loaded
        self.model = model = loaded.model
        self.device, self.shards, self.max_len = loaded.device, loaded.shards, loaded.max_len
        self.max_num_seqs = config.max_num_seqs or self.usual_num_slots
        self.batch_invariant = config.batch_invariant
        self.head: Any = model.get_output_embeddings()
        self.backbone: Any = decoder_of(model)
        self.vision: VisionTower | None = None
        """Looks at pictures, where the model can and the engine has their reader."""
        self.logit_rule = LogitRule.of(model.config)
        shapes = tuple((call.num_kv_heads, max(call.key_dim, call.value_dim)) for call in loaded.probe.calls)
        self.cache_shape = CacheShape(shapes, model.dtype, config.block_size)
        self.cache: list[LayerCache] = []
        self.kernels: DecoderOps = TorchKernels()
        self.decoder: Decoder | None = None
        self.routing: Routing | None = None
        """Every token's choice is kept beside its keys and values, where it is recorded."""
        self._experts_SLK: torch.Tensor | None = None
        """int16: the experts of every token in the cache, by its slot."""
        self._num_chosen = 0
        self.adapters = AdapterStore(model)
        self._quantized: dict[int, Writer] = {}

    def allocate_cache(self, num_blocks: int) -> None:
        shape = self.cache_shape
        sizes = [(num_blocks, shape.block_size, heads, dim) for heads, dim in shape.layers]
        # Zeros, not garbage: a masked score of NaN is still NaN, so unwritten slots must be finite.
        zeros = partial(torch.zeros, dtype=shape.dtype, device=self.device)
        self.cache = [LayerCache(zeros(size), zeros(size)) for size in sizes]
        if self.routing is not None and self._num_chosen:
            size = (num_blocks * shape.block_size, self.routing.num_layers, self._num_chosen)
            self._experts_SLK = torch.full(size, UNKNOWN, dtype=torch.int16, device=self.device)

    def free_cache(self) -> None:
        self.cache = []
        self._experts_SLK = None
        if self.vision is not None:
            self.vision.forget()

    def free_graphs(self) -> None:
        """What was captured, and the memory that it needs."""

    def free_bytes(self) -> int:
        """Memory that a KV cache could take now."""
        return free_host_bytes()

    def prepare(self, max_rows: int | None = None) -> None:
        """Whatever is worth doing once before the first step, in the thread that will launch it. max_rows: of a step,
        where they are known to be fewer than slots."""

    def offload_weights(self) -> None:
        """Host memory is where CPU weights live already: there is nothing to give back."""

    def reload_weights(self) -> None: ...

    @property
    def num_words(self) -> int:
        """Tokens that it knows."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def step_bytes(self) -> int:
        """How long a step of few rows takes, in bytes read meanwhile."""
        weights = sum(int(p.nbytes) for p in self.model.parameters())
        return weights + len(self.cache_shape.layers) * self.layer_bytes

    def enter_thread(self) -> None:
        """Called once by the thread that will launch the steps."""
        torch.set_grad_enabled(False)

    def active(self) -> AbstractContextManager[Any]:
        """Around what a second runner launches in that thread."""
        return nullcontext()

    def leave_thread(self) -> None:
        """Called once by that thread at its end."""

    def fence(self) -> Callable[[], None]:
        """Called in the engine's thread: what it queues from then on comes after what this thread has queued so far."""
        return lambda: None

    def weight_targets(self) -> WeightTargets:
        return WeightTargets(self.model, self.shards, quantized=self._quantized)

    def finish_update(self) -> None:
        """Called after parameters were overwritten, before the next step."""
        if self.vision is not None:
            self.vision.forget()

    def close(self) -> None:
        """The end, from any thread; may be called twice."""

    @torch.inference_mode()
    def launch(self, steps: list[StepBatch]) -> PendingTurn:
        """The first step may hold anything, later ones the newest tokens of its first rows."""
        first = steps[0]
        tokens_KS = np.zeros((len(steps), len(first.sampled)), dtype=np.int64)
        logprobs_KS = np.zeros(tokens_KS.shape, dtype=np.float32)
        scores: list[Floats] = []
        top = None
        for index, batch in enumerate(steps):
            num_rows = len(batch.sampled)
            if index:
                batch.token_ids_N[:] = tokens_KS[index - 1, :num_rows]
            hidden_NE = self.forward(batch)
            if num_rows:
                logits_SV = self.logits(hidden_NE[torch.from_numpy(batch.sampled_rows_S)])
                if batch.sampling.num_top:
                    tokens, logprobs = likeliest(logits_SV, batch.sampling)
                    top = tokens.numpy(), logprobs.numpy()
                tokens_S, logprobs_S = sample(logits_SV, batch.sampling)
                tokens_KS[index, :num_rows] = tokens_S.numpy()
                logprobs_KS[index, :num_rows] = logprobs_S.numpy()
            scores += [self.score(hidden_NE[row:], chunk).numpy() for chunk, row in batch.scored]
        result = TurnResult(tokens_KS, logprobs_KS, scores, top)
        return lambda: result

    @torch.inference_mode()
    def follow(self, steps: list[StepBatch]) -> None:
        """A turn that rank 0 launches, computed with it on another rank: nothing is sampled here."""
        for batch in steps:
            self.forward(batch)

    def routed_experts(self, block_ids: list[int], num_tokens: int) -> npt.NDArray[np.int16] | None:
        """[num_tokens, L, K] of a sequence whose cache lies in these blocks; None where nothing is recorded."""
        if self._experts_SLK is None:
            return None
        size = self.cache_shape.block_size
        blocks = torch.tensor(block_ids[: -(-num_tokens // size)], dtype=torch.int64, device=self.device)
        slots = (blocks[:, None] * size + torch.arange(size, device=self.device)).flatten()[:num_tokens]
        found: npt.NDArray[np.int16] = self._experts_SLK[slots].cpu().numpy()
        return found

    def keep_experts(self, slots_N: torch.Tensor) -> None:
        """Of the pass that has just been computed."""
        if self.routing is None:
            return
        chosen_NLK = self.routing.take()
        self._num_chosen = chosen_NLK.shape[2]
        if self._experts_SLK is not None:
            self._experts_SLK.index_copy_(0, slots_N.long(), chosen_NLK)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Last hidden states [N, E], after the final norm."""
        paged = PagedBatch(
            slots_N=torch.from_numpy(batch.kv_slots_N),
            query_starts_B1=torch.from_numpy(batch.query_starts_B1),
            context_lens_B=torch.from_numpy(batch.context_lens_B),
            block_tables_BM=torch.from_numpy(batch.block_tables),
            num_decodes=batch.num_decodes,
        )
        ids, positions = torch.from_numpy(batch.token_ids_N), torch.from_numpy(batch.positions_N)
        visual = self.visual_rows(batch)
        if self.decoder is not None and not batch.adapters:
            hidden_NE = self.decoder(ids, positions, paged, self.cache, visual=visual)
        else:
            with self.adapters.active(batch.adapters, self.device):
                hidden_NE = self.run_modules(paged, ids, positions, visual)
        self.keep_experts(paged.slots_N)
        return hidden_NE

    def all_logits(self, batch: StepBatch) -> torch.Tensor:
        """[N, V] of every token, for the check at load."""
        return self.logits(self.forward(batch))

    def use_kernels(self, ops: DecoderOps, *, fast_path: bool) -> None:
        """The decoder over them where it can be had, and else the modules."""
        self.kernels = ops
        held, is_invariant = self._loaded, self.batch_invariant
        if fast_path:
            structure = read_structure(held.model, held.probe, fuse=held.is_owned, max_len=held.max_len)
            # A model with experts cannot have batch-invariant products throughout.
            if structure is not None and (structure.is_dense or not is_invariant):
                linear = invariant_linear if is_invariant else None
                group = None if held.shards is None else held.shards.group
                self.decoder = Decoder(structure, ops, linear, group)
        if is_invariant and self.decoder is None:
            self.use_modules()

    def quantize(self, *, weights: str | None, cache: bool) -> None:
        """Weights have 8 or 4 bits (`fp8`, `int4`), keys and values 8, from here on. Before the cache is made."""
        if self.decoder is None:
            raise UnsupportedError(
                f"quantization and kv_cache_dtype need the fast path, which {self.model.config.model_type!r} does not "
                "have: leave both unset"
            )
        if weights:
            self._quantized = quantize_weights(self.decoder.structure, weights)
        if cache and multiplies_fp8(self.device):
            self.cache_shape = replace(self.cache_shape, dtype=FP8)
        is_fp8 = weights == "fp8"
        if (is_fp8 or cache) and not multiplies_fp8(self.device):
            logger.warning("no FP8 units here: numbers are rounded to 8 bits and multiplied as before")
        quantize_stages(self.decoder, weights=is_fp8, cache=cache)

    def use_modules(self) -> None:
        """Never the decoder: what it computes is not what the modules do."""
        if self.shards is not None:
            raise refusal(
                self.model, "the fast path computes something else, and only that runs on several ranks"
            )
        self.decoder = None
        if self.batch_invariant:
            raise UnsupportedError(
                f"batch_invariant needs the fast path, which {self.model.config.model_type!r} in {self.model.dtype} "
                "does not have here (on the CPU it also needs a C++ compiler): set batch_invariant=false"
            )

    def visual_rows(self, batch: StepBatch) -> VisualRows | None:
        if batch.pictures is None:
            return None
        assert self.vision is not None, "admission refuses pictures where there is no tower"
        return self.vision.rows(batch.pictures, one_by_one=self.batch_invariant)

    def run_modules(
        self,
        paged: PagedBatch,
        ids_N: torch.Tensor,
        positions_N: torch.Tensor,
        visual: VisualRows | None = None,
    ) -> torch.Tensor:
        """Through the modules' own forward methods."""
        # A batch of its own: a captured step reads the caller's slots anew each time it is replayed.
        widened = replace(paged, slots_N=paged.slots_N.long())
        with PagedContext(widened, self.cache, self.kernels):
            inputs = {"input_ids": ids_N.long()[None], "position_ids": positions_N.long()[None]}
            if visual is not None:
                inputs = visual.decoder_inputs(self.model.get_input_embeddings()(ids_N.long()))
            out = self.backbone(**inputs, use_cache=False)
        hidden: torch.Tensor = out.last_hidden_state
        return hidden[0]

    def logits(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        return self.logit_rule(self.head(hidden_SE).float())

    def score(self, hidden_TE: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """log p of the token after each of the chunk's, a few at a time; of an embedding, the last hidden state."""
        seq, start, end = chunk.seq, chunk.start, chunk.start + chunk.length
        assert isinstance(seq, ScoredSequence)
        if seq.is_embedding:
            return hidden_TE[chunk.length - 1].to(torch.float32, copy=True)  # a graph's own memory, perhaps
        targets_T = torch.tensor(seq.tokens[start + 1 : end + 1].tolist(), device=self.device)
        parts = [torch.zeros(0, device=self.device)]
        for at in range(0, len(targets_T), SCORE_ROWS):
            targets_S = targets_T[at : at + SCORE_ROWS]
            hidden_SE = hidden_TE[at : at + len(targets_S)]
            parts.append(self.token_logprobs(hidden_SE, targets_S, seq.temperature or 1.0))
        return torch.cat(parts)

    def token_logprobs(
        self, hidden_SE: torch.Tensor, targets_S: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        logprobs_SV = self.logits(hidden_SE).div_(temperature).log_softmax(-1)
        return logprobs_SV.gather(1, targets_S[:, None])[:, 0]


class CpuRunner(ModelRunner):
    """What it runs on depends on the machine and the model, best first:

    the decoder, in C++       a compiler, and a model that rill.models.decode.structure can describe; with AVX-512
                              products too
    the decoder, in torch     such a model without a compiler
    the modules' own methods  everything else; attention and the head's product are still compiled where they can be
    """

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


def free_host_bytes(cgroups: Path = CGROUPS) -> int:
    """What a process may still take: the machine's, or the container's where that is less. Files that the kernel keeps
    in memory count as free, for both."""
    free: int = psutil.virtual_memory().available
    for limit_file, used_file in _FILES:
        try:
            limit, used = ((cgroups / file).read_text().strip() for file in (limit_file, used_file))
        except OSError:
            continue
        if limit.isdigit():  # "max": no limit
            free = min(free, max(0, int(limit) - int(used) + _cached_bytes(cgroups / limit_file)))
    return free


def _cached_bytes(limit_file: Path) -> int:
    """Of the group's pages, those of files that nobody has used lately."""
    try:
        lines = (limit_file.parent / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def refusal(model: PreTrainedModel, reason: str) -> ModelError:
    return ModelError(
        f"the native engine does not run {model.config.model_type!r}: {reason}; use the vllm or sglang engine for it"
    )
