"""An engine without a model: what it says follows from each request's seed alone, so that a test knows every token.

Registered by its "module:Class" path, it runs inside the real rollout worker. Token number i of a request is
`script(seed)[i]`, whether it is said in one go or continued; its version is that of the weights held when it was said.
It keeps a record of every completion in `record_dir`, one file a process, to be compared with what reaches the trainer.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rill.config import PartConfig
from rill.errors import EngineError, StuckError
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
from rill.types import Floats, PolicyVersion, StopReason, TokenIds

ENGINE = "tests.workflows.scripted_engine:ScriptedEngine"
FIRST_TOKEN, NUM_TOKENS = 10, 60
NEVER_S = 3600.0
WEIGHT = "w"
"""The only weight that matters: the canary sees its value."""


def script(seed: int, max_new_tokens: int) -> tuple[TokenIds, Floats]:
    """What a request with this seed is answered with."""
    rng = np.random.default_rng(seed)
    length = int(rng.integers(1, max_new_tokens + 1))
    tokens = rng.integers(FIRST_TOKEN, FIRST_TOKEN + NUM_TOKENS, length).astype(np.int32)
    return tokens, (-rng.random(length)).astype(np.float32)


def scores(value: float, sequences: Sequence[TokenIds]) -> list[Floats]:
    """Log-probabilities that tell one value of the weight from another."""
    return [np.where(np.arange(len(s)) > 0, -value - 0.001 * s, 0.0).astype(np.float32) for s in sequences]


@dataclass(slots=True)
class _Running:
    request: Request
    tokens: TokenIds
    logprobs: Floats
    ticks_to_wait: int
    on_delta: Callable[[Delta], None] | None
    versions: list[int] = field(default_factory=list)
    future: Future[Completion] = field(default_factory=Future)

    def newest(self) -> Delta:
        last = len(self.versions) - 1
        return Delta(
            request_id=self.request.id,
            token_ids=self.tokens[last : last + 1],
            logprobs=self.logprobs[last : last + 1],
            versions=np.array(self.versions[-1:], np.int32),
        )

    def finish(self, reason: StopReason) -> None:
        count = len(self.versions)
        self.future.set_result(
            Completion(
                request_id=self.request.id,
                token_ids=self.tokens[:count],
                logprobs=self.logprobs[:count],
                versions=np.array(self.versions, np.int32),
                stop_reason=reason,
            )
        )


class ScriptedEngine:
    """rill.inference.base.Engine, deterministic."""

    class Config(PartConfig):
        type: str = ENGINE
        model: Any = None
        record_dir: str
        tick_s: float = 0.001
        """Seconds per token."""
        max_delay_ticks: int = 20
        """Requests wait up to this long before their first token, so that they finish in any order."""
        stands_from: str = "~"
        """Answers of the group of this name and later ones wait for their last token for ever. ~: none."""
        fault: Literal["", "ignores updates", "stale cache", "hangs once"] = ""
        fault_from: int = 1 << 30
        """The version from which the fault shows."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._version = PolicyVersion(0)
        self._value = 0.0
        self._cached: list[Floats] = []
        """Scores that outlive their version, where that is the fault."""
        self._running: dict[str, _Running] = {}
        self._waiting: list[_Running] = []
        self._pause: PauseMode | None = None
        self._changed = threading.Condition()
        self._is_closed = False
        self._record = (Path(config.record_dir) / f"engine-{os.getpid()}.jsonl").open("a", encoding="utf-8")
        threading.Thread(target=self._run, name="scripted", daemon=True).start()

    @property
    def features(self) -> frozenset[Feature]:
        return frozenset(
            {
                Feature.PARTIAL_ROLLOUT,
                Feature.SEEDED,
                Feature.SEEDED_BY_POSITION,
                Feature.SCORE,
                Feature.UPDATE_WEIGHTS,
                Feature.STREAM,
            }
        )

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def max_context(self) -> int:
        return 4096

    def submit(
        self, requests: Sequence[Request], on_delta: Callable[[Delta], None] | None = None
    ) -> list[Future[Completion]]:
        made = []
        for request in requests:
            seed, given = request.sampling.seed or 0, request.num_generated
            tokens, logprobs = script(seed, request.sampling.max_new_tokens + given)
            delay = 0 if given else seed % (self.config.max_delay_ticks + 1)
            made.append(_Running(request, tokens[given:], logprobs[given:], delay, on_delta))
        with self._changed:
            if self._pause is PauseMode.FINISH:
                self._waiting += made
            else:
                self._running.update((run.request.id, run) for run in made)
            self._changed.notify_all()
        return [run.future for run in made]

    def generate(self, requests: Sequence[Request], timeout_s: float = 600.0) -> list[Completion]:
        return [future.result(timeout_s) for future in self.submit(requests)]

    def score(
        self, sequences: Sequence[TokenIds], temperature: float = 1.0, timeout_s: float = 600.0
    ) -> list[Floats]:
        if self.config.fault == "stale cache" and self._version < self.config.fault_from:
            self._cached = scores(self._value, sequences)
        return self._cached or scores(self._value, sequences)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        with self._changed:
            names = list(self._running) if request_ids is None else list(request_ids)
            ended = [self._running.pop(name) for name in names if name in self._running]
        for run in ended:
            self._note(run)
            run.finish(StopReason.ABORTED)

    def pause(self, mode: PauseMode, timeout_s: float = 600.0) -> None:
        with self._changed:
            self._pause = mode
            if mode is PauseMode.FINISH and not self._changed.wait_for(lambda: not self._running, timeout_s):
                raise StuckError("the scripted engine did not finish what ran")

    def resume(self) -> None:
        with self._changed:
            self._pause = None
            self._running.update((run.request.id, run) for run in self._waiting)
            self._waiting = []
            self._changed.notify_all()

    def release(self, level: MemoryLevel) -> None:
        if self._running:
            raise EngineError("requests run")

    def restore(self) -> None: ...

    def update_weights(self, tensors: NamedTensors, version: PolicyVersion, *, partial: bool = False) -> None:
        held = {name: tensor.clone() for name, tensor in tensors}
        if self.config.fault == "hangs once" and version >= self.config.fault_from and self._is_first():
            time.sleep(NEVER_S)
        with self._changed:
            is_faulty = self.config.fault == "ignores updates" and version >= self.config.fault_from
            if not is_faulty:
                self._value = float(held[WEIGHT])
            self._version = version

    def rewind(self) -> None:
        self._version = PolicyVersion(0)

    def flush(self) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._running), version=self._version)

    def close(self) -> None:
        self._is_closed = True

    def _is_first(self) -> bool:
        """Of all the processes of a run."""
        try:
            (Path(self.config.record_dir) / "hung").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _run(self) -> None:
        while not self._is_closed:
            with self._changed:
                self._changed.wait_for(lambda: self._running and self._pause is not PauseMode.INTERRUPT, 1.0)
                ended = [] if self._pause is PauseMode.INTERRUPT else self._tick()
                self._changed.notify_all()
            for run in ended:
                self._note(run)
                run.finish(StopReason.EOS)
            time.sleep(self.config.tick_s)

    def _tick(self) -> list[_Running]:
        """One token more for every running request; returns those that ended."""
        ended = []
        for name, run in list(self._running.items()):
            if run.ticks_to_wait > 0:
                run.ticks_to_wait -= 1
                continue
            if len(run.versions) + 1 == len(run.tokens) and name >= self.config.stands_from:
                continue
            run.versions.append(int(self._version))
            if run.on_delta is not None and len(run.versions) < len(run.tokens):
                run.on_delta(run.newest())
            if len(run.versions) == len(run.tokens):
                ended.append(self._running.pop(name))
        return ended

    def _note(self, run: _Running) -> None:
        count = len(run.versions)
        record = {
            "id": run.request.id,
            "at": time.monotonic(),
            "engine": os.getpid(),
            "num_given": len(run.request.token_ids),
            "tokens": run.tokens[:count].tolist(),
            "logprobs": run.logprobs[:count].tolist(),
            "versions": run.versions,
        }
        self._record.write(json.dumps(record) + "\n")
        self._record.flush()
