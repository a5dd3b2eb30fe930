"""What every inference engine is to the rest of rill.

Callers: rollout workers, environments, the server, evaluation, and reference, teacher and judge workers.

An engine takes token ids and gives token ids, each with its log-probability and with the policy version that
made it. Text exists only at its edges (stop strings). All methods are thread-safe and block for at most the
deadline they are given; `submit` never blocks: it returns a concurrent.futures.Future, which sync code waits on
and async code wraps with asyncio.wrap_future.

Guarantees, checked for every engine by tests/inference/conformance.py:
- versions[i] is the version of the weights that computed logprobs[i]; a cache entry never outlives its version.
- logprobs are log-softmax of the logits after penalties, bias and temperature, before top-k/p/min-p truncation
  (temperature 0 reports the temperature-1 distribution), so that a trainer can recompute them.
- A request interrupted by pause(INTERRUPT) keeps its tokens and continues after resume(), under new weights if
  they changed; its future completes once, with the versions of every token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from rill.registry import Registry
from rill.types import Floats, Ints, Picture, PolicyVersion, SamplingParams, StopReason, TokenIds

if TYPE_CHECKING:
    import torch

ENGINES = Registry(
    "engine",
    {
        "native": "rill.inference.native.engine:NativeEngine",
        "vllm": "rill.inference.vllm:VllmEngine",
        "vllm_server": "rill.inference.vllm_server:VllmServerEngine",
        "sglang": "rill.inference.sglang:SglangEngine",
        "openai": "rill.inference.openai:OpenAIEngine",
    },
)


class Feature(StrEnum):
    """What a training run may need of an engine; an engine lists those it has."""

    STREAM = "stream"
    SCORE = "score"
    PARTIAL_ROLLOUT = "partial_rollout"
    UPDATE_WEIGHTS = "update_weights"
    RELEASE_MEMORY = "release_memory"
    GUIDED = "guided"
    TOP_LOGPROBS = "top_logprobs"
    EMBED = "embed"
    LORA = "lora"
    SEEDED = "seeded"
    SEEDED_BY_POSITION = "seeded_by_position"  # a continued sequence draws what it would have drawn in one go
    BATCH_INVARIANT = "batch_invariant"
    PICTURES = "pictures"


class GuideKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"  # in Lark's notation, or in llama.cpp's (GBNF)
    CHOICE = "choice"  # a JSON list of strings


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """What the completion must be an instance of. Log-probabilities are still those before it, as with top-k. One that
    is whole ends the completion, whatever min_new_tokens says."""

    kind: GuideKind
    text: str


class PauseMode(StrEnum):
    FINISH = "finish"  # let running requests end; admit none
    INTERRUPT = "interrupt"  # stop between two steps; keep the tokens; continue on resume()


class MemoryLevel(StrEnum):
    """How much device memory release() gives back. Each level includes the ones before it."""

    KV = "kv"
    WEIGHTS = "weights"
    GRAPHS = "graphs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One completion to make. Several samples of one prompt are several requests; they share its prefix."""

    id: str
    token_ids: TokenIds
    """Everything the model has seen so far: for a continued sequence, the tokens generated earlier too."""
    num_generated: int = 0
    """How many of the last of them were: stop strings and penalties of the native engine go on from there."""
    sampling: SamplingParams = SamplingParams()
    pictures: tuple[Picture, ...] = ()
    """What placeholders among the tokens stand for, in their order (Feature.PICTURES)."""
    adapter: str | None = None
    """Name of a LoRA adapter; None is the base model."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    priority: int = 0
    """Lower runs first."""
    guide: Guide | None = None
    """Only what its grammar allows is sampled (Feature.GUIDED)."""
    num_top_logprobs: int = 0
    """How many of the likeliest tokens to report at each place (Feature.TOP_LOGPROBS)."""
    delta_interval_s: float = 0.0
    """How long new tokens may wait for others before on_delta hears of them; the first and the last never wait. Telling
    of every token by itself costs an engine as much as making it. 0, and engines elsewhere: told as they come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopTokens:
    """The likeliest tokens at each place, of the reported distribution, the largest first."""

    token_ids: Ints  # [T, num_top_logprobs]
    logprobs: Floats

    @staticmethod
    def joined(parts: Iterable[TopTokens | None]) -> TopTokens | None:
        """One after the other; None where there are none."""
        found = [part for part in parts if part is not None]
        if not found:
            return None
        return TopTokens(
            token_ids=np.concatenate([part.token_ids for part in found]),
            logprobs=np.concatenate([part.logprobs for part in found]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Tokens, with what belongs to each of them."""

    token_ids: TokenIds
    logprobs: Floats
    versions: Ints
    top: TopTokens | None = None

    def part(self, first: int = 0, end: int | None = None) -> dict[str, Any]:
        """These fields of another that has some of the tokens."""
        part, top = slice(first, end), self.top
        if top is not None:
            top = TopTokens(token_ids=top.token_ids[part], logprobs=top.logprobs[part])
        kept = {name: getattr(self, name)[part] for name in ("token_ids", "logprobs", "versions")}
        return kept | {"top": top}


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta(Sampled):
    """Tokens that a stream has gained since the last delta."""

    request_id: str
    stop_reason: StopReason | None = None
    """Set on the last delta."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(Sampled):
    """The new tokens of one request, prompt excluded."""

    request_id: str
    stop_reason: StopReason
    stop_text: str | None = None
    """The stop string that matched, if one did. Its tokens are part of token_ids."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    routed_experts: Any = None
    """[T, L, K]: the experts chosen for each token of the completion, or of prompt and completion, by layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    num_running: int = 0
    num_waiting: int = 0
    num_finished: int = 0
    num_preempted: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_draft_tokens: int = 0
    """Proposed by speculation, and how many of them came true."""
    num_accepted_tokens: int = 0
    num_kv_blocks: int = 0
    num_free_kv_blocks: int = 0
    version: PolicyVersion = PolicyVersion(0)
    extra: dict[str, float] = field(default_factory=dict)


NamedTensors = Iterable[tuple[str, "torch.Tensor"]]
"""Hugging Face parameter names with full (unsharded) tensors, in any order."""


class Engine(Protocol):
    """Constructed from its Config (a PartConfig whose type is its registered name)."""

    @property
    def features(self) -> frozenset[Feature]: ...

    @property
    def version(self) -> PolicyVersion: ...

    @property
    def max_context(self) -> int: ...

    @property
    def vocab_size(self) -> int | None:
        """Token ids are below this. None: the engine is elsewhere and did not say."""
        ...

    def submit(
        self, requests: Sequence[Request], on_delta: Callable[[Delta], None] | None = None
    ) -> list[Future[Completion]]:
        """Queue requests, all at once: they are scheduled as if they had arrived in one instant.

        on_delta is called from the engine's thread and must not block. A malformed request raises RequestError
        here, before anything is queued.
        """
        ...

    def generate(self, requests: Sequence[Request], timeout_s: float = 600.0) -> list[Completion]:
        """submit() and wait, in the order of the requests."""
        ...

    def score(
        self,
        sequences: Sequence[TokenIds],
        temperature: float = 1.0,
        timeout_s: float = 600.0,
        *,
        adapter: str | None = None,
    ) -> list[Floats]:
        """log-probability of every token given those before it; 0 at position 0. Generates nothing. `adapter`: by the
        model with that one; only asked of an AdapterEngine."""
        ...

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests (None: all) now; their futures complete with ABORTED and the tokens so far."""
        ...

    def pause(self, mode: PauseMode, timeout_s: float = 600.0) -> None: ...

    def resume(self) -> None: ...

    def release(self, level: MemoryLevel) -> None:
        """Give device memory back. Raises EngineError unless paused or idle with nothing running."""
        ...

    def restore(self) -> None:
        """Take back whatever release() gave; released weights come back as they were."""
        ...

    def update_weights(self, tensors: NamedTensors, version: PolicyVersion, *, partial: bool = False) -> None:
        """Copy new weights in, set the version, and drop every cache entry of older versions.

        Works between two steps, whether paused or not. Every parameter must be given unless partial; an unknown name or
        a wrong shape is a WeightSyncError and leaves the engine unavailable until a whole update succeeds; a version
        that does not grow is one too, and changes nothing. Transports live in rill.weights: they end in this call.
        """
        ...

    def rewind(self) -> None:
        """Whose weights these are goes back to older ones: the next update may bring any version. Until it has, nothing
        should be sampled."""
        ...

    def flush(self) -> None:
        """Drop the prefix cache."""
        ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""What a LoRA adapter's folder holds, as PEFT writes it."""


@runtime_checkable
class AdapterEngine(Protocol):
    """What an engine that serves LoRA adapters beside the base model has besides; see Request.adapter."""

    @property
    def adapters(self) -> frozenset[str]:
        """Those that are loaded, by name."""
        ...

    def load_adapter(self, name: str, source: str | Path) -> None:
        """From a folder in PEFT's format, in place of one of the same name. ModelError: it does not fit the model."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Requests that still use it are aborted. A name that is not loaded is no error."""
        ...


@runtime_checkable
class EmbeddingEngine(Protocol):
    """What an engine with Feature.EMBED has besides."""

    def embed(self, sequences: Sequence[TokenIds], timeout_s: float = 600.0) -> list[Floats]:
        """The hidden state of each sequence's last token, after the final norm."""
        ...
