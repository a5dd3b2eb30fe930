"""An engine of your own: here the smallest that training can use, one forward pass of transformers per token, no cache.

    rill train demo rollout.engine.type=examples.own_engine:PlainEngine

It is slow and plain on purpose: what is left is what every engine owes. Each token has its log-probability and the
version of the weights that made it; new weights come in between two tokens; an interrupted request keeps what it has
and goes on. tests/test_examples.py lets the suite of all engines judge it (tests/inference/conformance.py).

    submit() ──▶ flights ──▶ the engine's thread: one token of each in turn ──▶ futures
                              └─ under `_turn`, which pause(), score() and update_weights() take between two tokens
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rill.config import PartConfig
from rill.errors import EngineError, StuckError, UnsupportedError, WeightSyncError
from rill.inference.base import (
    Completion,
    Delta,
    EngineStats,
    Feature,
    MemoryLevel,
    NamedTensors,
    PauseMode,
    Request,
)
from rill.inference.parameters import checked
from rill.inference.requests import check_ids, check_request, wait_for_all
from rill.inference.tally import Tally
from rill.models.loading import ModelConfig, load_model, load_tokenizer
from rill.types import Floats, PolicyVersion, SamplingParams, StopReason, TokenIds

BREATH_S = 1e-4
"""Between two rounds, so that whoever waits for the engine's turn gets it."""


class PlainEngine:
    class Config(PartConfig):
        model: ModelConfig
        """The recipe's own, unless it says otherwise."""

    features = frozenset(
        {
            Feature.STREAM,
            Feature.SCORE,
            Feature.PARTIAL_ROLLOUT,
            Feature.UPDATE_WEIGHTS,
            Feature.SEEDED,
            Feature.BATCH_INVARIANT,  # every sequence is computed alone
        }
    )

    def __init__(self, config: Config) -> None:
        self._model = load_model(config.model, dtype=torch.float32)
        self._parameters = dict(self._model.named_parameters())
        self._eos = _ends_of(config.model, self._model)
        self.max_context = int(self._model.config.max_position_embeddings)
        self.vocab_size: int | None = int(self._model.config.vocab_size)
        self.version = PolicyVersion(0)
        self._flights: dict[str, _Flight] = {}
        self._tally = Tally()
        self._turn = threading.Condition()
        self._is_paused = self._is_closed = False
        self._fault = ""
        self._thread = threading.Thread(target=self._work, name="plain-engine", daemon=True)
        self._thread.start()

    def submit(
        self, requests: Sequence[Request], on_delta: Callable[[Delta], None] | None = None
    ) -> list[Future[Completion]]:
        for request in requests:
            check_request(request, self, adapters=())
            _refuse_what_is_not_here(request.sampling)
        with self._turn:
            if self._fault or self._is_closed:
                raise EngineError(f"the engine is out of service: {self._fault or 'it was closed'}")
            check_ids([request.id for request in requests], self._flights)
            flights = [_Flight(request, on_delta) for request in requests]
            self._flights |= {flight.request.id: flight for flight in flights}
            self._turn.notify_all()
        return [flight.future for flight in flights]

    def generate(self, requests: Sequence[Request], timeout_s: float = 600.0) -> list[Completion]:
        futures = self.submit(requests)
        ids = [request.id for request in requests]
        return wait_for_all(futures, timeout_s, what="plain engine", abort=lambda: self.abort(ids))

    @torch.inference_mode()
    def score(
        self, sequences: Sequence[TokenIds], temperature: float = 1.0, timeout_s: float = 600.0
    ) -> list[Floats]:
        with self._turn:
            return [self._logprobs_of(sequence, temperature) for sequence in sequences]

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        with self._turn:
            for request_id in list(self._flights) if request_ids is None else request_ids:
                if request_id in self._flights:
                    self._end(self._flights[request_id], StopReason.ABORTED)

    def pause(self, mode: PauseMode, timeout_s: float = 600.0) -> None:
        with self._turn:
            if mode is PauseMode.FINISH and not self._turn.wait_for(lambda: not self._flights, timeout_s):
                raise StuckError(f"{len(self._flights)} requests had not ended after {timeout_s} s")
            self._is_paused = True  # nothing is under way while this thread has the turn

    def resume(self) -> None:
        with self._turn:
            self._is_paused = False
            self._turn.notify_all()

    def release(self, level: MemoryLevel) -> None:
        """Host memory is not scarce: nothing is given back, and the feature is not listed."""

    def restore(self) -> None: ...

    @torch.no_grad()
    def update_weights(self, tensors: NamedTensors, version: PolicyVersion, *, partial: bool = False) -> None:
        with self._turn:
            self._fault = "its weights are half old and half new"  # unless what follows comes to its end
            if version <= self.version:
                raise WeightSyncError(f"version {version} follows {self.version}: versions must grow")
            shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
            for name, tensor in checked(tensors, shapes, partial=partial):
                self._parameters[name].copy_(tensor)
            self.version, self._fault = version, ""

    def rewind(self) -> None:
        self.version = PolicyVersion(0)

    def flush(self) -> None:
        """There is no cache."""

    def stats(self) -> EngineStats:
        return self._tally.stats(num_running=len(self._flights), num_waiting=0, version=self.version)

    def close(self) -> None:
        self.abort()
        with self._turn:
            self._is_closed = True
            self._turn.notify_all()
        self._thread.join(timeout=60)

    # --- the engine's thread -----------------------------------------------------------------------------

    @torch.inference_mode()
    def _work(self) -> None:
        while not self._is_closed:
            with self._turn:
                self._turn.wait_for(lambda: self._is_closed or (self._flights and not self._is_paused))
                for flight in list(self._flights.values()):
                    self._step(flight)
            time.sleep(BREATH_S)

    def _step(self, flight: "_Flight") -> None:
        """One more token."""
        sampling = flight.request.sampling
        ids = torch.tensor(flight.token_ids)[None]
        logits_V = self._model(ids).logits[0, -1].float()
        ends = set(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos)
        if len(flight.tokens) < sampling.min_new_tokens:
            logits_V[list(ends)] = -torch.inf
        logprobs_V = (logits_V / (sampling.temperature or 1.0)).log_softmax(-1)
        token = _sample(logprobs_V, sampling, flight.generator)
        reason = None
        if token in ends:
            reason = StopReason.STOP if token in sampling.stop_token_ids else StopReason.EOS
        elif len(flight.tokens) + 1 == sampling.max_new_tokens or ids.shape[1] + 1 == self.max_context:
            reason = StopReason.LENGTH
        flight.add(token, float(logprobs_V[token]), self.version, reason)
        self._tally.add(num_generated_tokens=1)
        if reason is not None:
            self._end(flight, reason)

    def _end(self, flight: "_Flight", reason: StopReason) -> None:
        del self._flights[flight.request.id]
        self._tally.end(num_prompt=len(flight.request.token_ids), num_cached=0)
        flight.future.set_result(flight.completion(reason))
        self._turn.notify_all()

    def _logprobs_of(self, tokens: TokenIds, temperature: float) -> Floats:
        ids = torch.tensor(np.asarray(tokens, dtype=np.int64))
        table_TV = (self._model(ids[None]).logits[0].float() / (temperature or 1.0)).log_softmax(-1)
        scores: Floats = np.zeros(len(ids), dtype=np.float32)
        scores[1:] = table_TV[:-1].gather(1, ids[1:, None])[:, 0].numpy()
        return scores


def _ends_of(config: ModelConfig, model: PreTrainedModel) -> frozenset[int]:
    """What ends an answer: a fresh model of a recipe does not say, its tokenizer does; some models name several."""
    said = [model.config.eos_token_id, model.generation_config and model.generation_config.eos_token_id]
    if config.tokenizer or config.path:
        said.append(load_tokenizer(config).eos_token_id)
    return frozenset(
        token for eos in said if eos is not None for token in (eos if isinstance(eos, list) else [eos])
    )


class _Flight:
    """One request on its way."""

    def __init__(self, request: Request, on_delta: Callable[[Delta], None] | None) -> None:
        self.request = request
        self.future: Future[Completion] = Future()
        self.tokens: list[int] = []
        self.generator = torch.Generator()
        if request.sampling.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(request.sampling.seed)
        self._on_delta = on_delta
        self._logprobs: list[float] = []
        self._versions: list[int] = []

    @property
    def token_ids(self) -> list[int]:
        return [*self.request.token_ids.tolist(), *self.tokens]

    def add(self, token: int, logprob: float, version: PolicyVersion, reason: StopReason | None) -> None:
        self.tokens.append(token)
        self._logprobs.append(logprob)
        self._versions.append(version)
        if self._on_delta is not None:
            last = Delta(request_id=self.request.id, **self._arrays(-1), stop_reason=reason)
            self._on_delta(last)

    def completion(self, reason: StopReason) -> Completion:
        return Completion(request_id=self.request.id, **self._arrays(0), stop_reason=reason)

    def _arrays(self, start: int) -> dict[str, Any]:
        return {
            "token_ids": np.array(self.tokens[start:], dtype=np.int32),
            "logprobs": np.array(self._logprobs[start:], dtype=np.float32),
            "versions": np.array(self._versions[start:], dtype=np.int32),
        }


def _sample(logprobs_V: torch.Tensor, sampling: SamplingParams, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logprobs_V.argmax())
    probs_V, order_V = logprobs_V.exp().sort(descending=True)
    keep_V = probs_V.cumsum(-1) - probs_V < sampling.top_p
    keep_V &= probs_V >= sampling.min_p * probs_V[0]
    if sampling.top_k:
        keep_V[sampling.top_k :] = False
    return int(order_V[torch.multinomial(probs_V * keep_V, 1, generator=generator)])


def _refuse_what_is_not_here(sampling: SamplingParams) -> None:
    """An option that nothing reads must not pass in silence."""
    plain = SamplingParams()
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "stop", "logit_bias"):
        if getattr(sampling, name) != getattr(plain, name):
            raise UnsupportedError(f"the plain engine has no {name}: leave it unset")
