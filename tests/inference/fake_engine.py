"""An Engine without a model: scripted or seeded tokens, one for every running request at each step.

For tests of what stands around an engine (server, router, replicas). It keeps the protocol's promises: versions,
pause and resume, aborts with the tokens so far, and seeded tokens that depend on (seed, position) only, so that a
request continued elsewhere goes on as if nothing had happened.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from rill.config import PartConfig
from rill.errors import EngineDiedError, EngineError, ModelError, RequestError, StuckError, WeightSyncError
from rill.inference.base import (
    ADAPTER_FILES,
    Completion,
    Delta,
    EngineStats,
    Feature,
    MemoryLevel,
    NamedTensors,
    PauseMode,
    Request,
)
from rill.inference.parameters import Checkpoint
from rill.inference.requests import check_request
from rill.inference.tally import Tally
from rill.models.tokenizer import build_char_tokenizer
from rill.types import Floats, PolicyVersion, StopReason, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EOS = 2
LOGPROB = -0.5


class _Running:
    def __init__(self, request: Request, script: list[int], on_delta: Callable[[Delta], None] | None) -> None:
        self.request = request
        self.script = script
        self.on_delta = on_delta
        self.future: Future[Completion] = Future()
        self.ids: list[int] = []
        self.versions: list[int] = []


class FakeEngine:
    class Config(PartConfig):
        type: Literal["tests.inference.fake_engine:FakeEngine"] = "tests.inference.fake_engine:FakeEngine"
        step_s: float = 0.0
        """Pause between steps, in seconds."""
        max_context: int = 512
        vocab_size: int = 103
        answer: str | None = None
        """What every request is answered with; unset: seeded tokens up to max_new_tokens."""
        refused_token: int | None = None
        """Prompts that hold this token are refused: a mistake that only the engine can know."""
        die_file: str | None = None
        """When this file exists, the process removes it and ends at the next step: a crash on demand."""
        busy_file: str | None = None
        """While this file exists, nothing is scored."""
        fail_file: str | None = None
        """When this file exists, it is removed and the engine fails for good; its process lives on."""

    features = frozenset({Feature.STREAM, Feature.SCORE, Feature.PARTIAL_ROLLOUT, Feature.UPDATE_WEIGHTS,
                          Feature.RELEASE_MEMORY, Feature.SEEDED, Feature.LORA})  # fmt: skip

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        self.updates: list[dict[str, tuple[int, ...]]] = []
        self.calls: list[str] = []
        self.seen: list[Request] = []
        self.adapters: frozenset[str] = frozenset()
        self._version = PolicyVersion(0)
        self._lock = threading.Condition()
        self._running: list[_Running] = []
        self._paused: PauseMode | None = None
        self._released: MemoryLevel | None = None
        self._is_closed = False
        self._tally = Tally()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Made when it is needed: replicas in tests start faster without it."""
        return build_char_tokenizer()

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def max_context(self) -> int:
        return self.config.max_context

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def submit(
        self, requests: Sequence[Request], on_delta: Callable[[Delta], None] | None = None
    ) -> list[Future[Completion]]:
        for request in requests:
            check_request(request, self, self.adapters)  # type: ignore[arg-type]
            if self.config.refused_token in request.token_ids:
                raise RequestError(f"request {request.id}: token {self.config.refused_token} is not for you")
        with self._lock:
            if self._is_closed:
                raise EngineError("the engine is closed")
            new = [_Running(r, self._script(r), on_delta) for r in requests]
            self._running += new
            self.seen += requests
            self._lock.notify_all()
        return [r.future for r in new]

    def generate(self, requests: Sequence[Request], timeout_s: float = 600.0) -> list[Completion]:
        return [f.result(timeout_s) for f in self.submit(requests)]

    def score(
        self, sequences: Sequence[TokenIds], temperature: float = 1.0, timeout_s: float = 600.0
    ) -> list[Floats]:
        while self.config.busy_file is not None and os.path.exists(self.config.busy_file):
            time.sleep(0.01)
        return [np.where(np.arange(len(s)) == 0, 0.0, LOGPROB).astype(np.float32) for s in sequences]

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        with self._lock:
            gone = [r for r in self._running if request_ids is None or r.request.id in request_ids]
            self._running = [r for r in self._running if r not in gone]
            self.calls.append("abort")
        for running in gone:
            self._finish(running, StopReason.ABORTED)

    def pause(self, mode: PauseMode, timeout_s: float = 600.0) -> None:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._paused = mode
            self.calls.append(f"pause {mode}")
            while mode is PauseMode.FINISH and self._running:
                if not self._lock.wait(min(0.05, timeout_s)) and time.monotonic() > deadline:
                    raise StuckError("pause: requests still run")

    def resume(self) -> None:
        with self._lock:
            self._paused = None
            self.calls.append("resume")
            self._lock.notify_all()

    def release(self, level: MemoryLevel) -> None:
        with self._lock:
            if self._running and self._paused is None:
                raise EngineError("release: requests are running; pause first")
            self._released = level
            self.calls.append(f"release {level}")

    def restore(self) -> None:
        self._released = None
        self.calls.append("restore")

    def update_weights(self, tensors: NamedTensors, version: PolicyVersion, *, partial: bool = False) -> None:
        if version <= self._version:
            raise WeightSyncError(f"version {version} is not newer than {self._version}")
        if isinstance(tensors, Checkpoint):  # as replicas get them: importing torch for it takes seconds
            shapes = tensors.shapes()
        else:
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors}
        if any(name.startswith("unknown") for name in shapes):
            raise WeightSyncError("unknown parameter")
        with self._lock:
            self.updates.append(shapes)
            self._version = version

    def rewind(self) -> None:
        self._version = PolicyVersion(0)

    def load_adapter(self, name: str, source: str | Path) -> None:
        try:
            (Path(source) / ADAPTER_FILES[0]).read_bytes()
        except (OSError, ValueError) as error:
            raise ModelError(f"the folder holds no adapter: {error}") from error
        self.adapters |= {name}

    def unload_adapter(self, name: str) -> None:
        self.adapters -= {name}

    def flush(self) -> None:
        self.calls.append("flush")

    def stats(self) -> EngineStats:
        with self._lock:
            return self._tally.stats(num_running=len(self._running), num_waiting=0, version=self._version)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        self.abort()
        self._thread.join(5)

    def _script(self, request: Request) -> list[int]:
        if self.config.answer is None:
            return []
        return [*self.tokenizer.encode(self.config.answer, add_special_tokens=False), EOS]

    def _loop(self) -> None:
        while True:
            with self._lock:
                while not self._is_closed and (not self._running or self._paused is PauseMode.INTERRUPT):
                    self._lock.wait()
                if self._is_closed:
                    return
                finished = [(r, reason) for r in self._running if (reason := self._step(r)) is not None]
                ended = [r for r, _ in finished]
                self._running = [r for r in self._running if r not in ended]
            for running, reason in finished:
                self._finish(running, reason)
            with self._lock:
                self._lock.notify_all()
            if self.config.die_file is not None and os.path.exists(self.config.die_file):
                os.unlink(self.config.die_file)
                os._exit(9)
            if self.config.fail_file is not None and os.path.exists(self.config.fail_file):
                os.unlink(self.config.fail_file)
                self._fail()
                return
            if self.config.step_s:
                time.sleep(self.config.step_s)

    def _fail(self) -> None:
        with self._lock:
            self._is_closed = True
            lost, self._running = self._running, []
        for running in lost:
            running.future.set_exception(EngineDiedError("the engine's thread died: asked to"))

    def _step(self, running: _Running) -> StopReason | None:
        sampling = running.request.sampling
        position = len(running.request.token_ids) + len(running.ids)
        if running.script:
            token = running.script[len(running.ids)]
        else:
            adapter = running.request.adapter or ""
            token = random.Random(f"{adapter}{sampling.seed}/{position}").randrange(
                40, self.config.vocab_size
            )
        running.ids.append(token)
        running.versions.append(self._version)
        self._tally.add(num_generated_tokens=1)
        reason = self._reason(running, token)
        if running.on_delta is not None:
            running.on_delta(
                Delta(
                    request_id=running.request.id,
                    token_ids=np.array([token], np.int32),
                    logprobs=np.array([LOGPROB], np.float32),
                    versions=np.array([self._version], np.int32),
                    stop_reason=reason,
                )
            )
        return reason

    def _reason(self, running: _Running, token: int) -> StopReason | None:
        sampling = running.request.sampling
        if token == EOS and not sampling.ignore_eos:
            return StopReason.EOS
        if token in sampling.stop_token_ids or self._stop_text(running) is not None:
            return StopReason.STOP
        return StopReason.LENGTH if len(running.ids) >= sampling.max_new_tokens else None

    def _stop_text(self, running: _Running) -> str | None:
        if not running.request.sampling.stop:
            return None
        text = self.tokenizer.decode(running.ids)
        return next((s for s in running.request.sampling.stop if s in text), None)

    def _finish(self, running: _Running, reason: StopReason) -> None:
        self._tally.end(num_prompt=len(running.request.token_ids), num_cached=0)
        if not running.future.set_running_or_notify_cancel():
            return
        running.future.set_result(
            Completion(
                request_id=running.request.id,
                token_ids=np.array(running.ids, np.int32),
                logprobs=np.full(len(running.ids), LOGPROB, np.float32),
                versions=np.array(running.versions, np.int32),
                stop_reason=reason,
                stop_text=self._stop_text(running) if reason is StopReason.STOP else None,
            )
        )
