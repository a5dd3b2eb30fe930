"""What an engine is told between two steps: pause, give memory back, take weights and adapters.

Runs in the engine's thread, as commands. An engine computes steps unless it

    is paused       started requests end (FINISH), or are computed again later from their tokens (INTERRUPT)
    is released     its memory is given back, up to a level
    is unavailable  an update failed half-way: its weights are no version's until a whole one succeeds
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from rill.errors import EngineError, WeightSyncError
from rill.inference.base import MemoryLevel, NamedTensors, PauseMode
from rill.inference.native.core import EngineCore
from rill.models.decode.low_rank import AdapterTensors
from rill.types import PolicyVersion


class EngineControl:
    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._targets = core.runner.weight_targets()
        self.released: MemoryLevel | None = None
        self.unavailable: str | None = None
        """Why no request can be served, in words."""
        self._drained: list[Future[None]] = []
        """Of pauses that wait for the last started request."""

    @property
    def can_step(self) -> bool:
        return self.unavailable is None and self.released is None and self._core.has_work

    def describe(self) -> str:
        """Any thread: the engine's state in words, for error messages."""
        scheduler = self._core.scheduler
        paused = f", paused ({scheduler.paused})" if scheduler.paused else ""
        released = f", memory released ({self.released})" if self.released else ""
        return f"{len(scheduler.running)} running, {len(scheduler.waiting)} waiting{paused}{released}"

    # --- pause -------------------------------------------------------------------------------------------

    def set_pause(self, mode: PauseMode | None) -> Future[None]:
        """The future is done once nothing more will run that the mode forbids."""
        self._core.scheduler.paused = mode
        self._core.drain()
        if mode is PauseMode.INTERRUPT:
            # What they had in the cache is found there again, but for their last block.
            self._core.preempt_all(but_scored=True)
        drained: Future[None] = Future()
        if mode is PauseMode.FINISH:
            self._drained.append(drained)
            self.report_drained()
        else:
            drained.set_result(None)
        return drained

    def report_drained(self) -> None:
        """After every step and round of commands: has the last started request ended?"""
        if not self._drained:
            return
        scheduler = self._core.scheduler
        has_started = scheduler.running or any(seq.num_preempted for seq in scheduler.waiting)
        if scheduler.paused is not PauseMode.FINISH or not has_started:
            for future in self._drained:
                future.set_result(None)
            self._drained.clear()

    def fail(self, error: BaseException) -> None:
        for waiter in self._drained:
            waiter.set_exception(error)
        self._drained.clear()

    # --- memory ------------------------------------------------------------------------------------------

    def release(self, level: MemoryLevel) -> None:
        core, scheduler = self._core, self._core.scheduler
        core.drain()
        runs = scheduler.running or (scheduler.waiting and not scheduler.paused)
        if runs and scheduler.paused is not PauseMode.INTERRUPT:
            raise EngineError(
                f"release({level}) while requests run ({self.describe()}): pause() first, or wait until idle"
            )
        core.preempt_all()
        scheduler.blocks.flush()
        core.runner.free_cache()
        if level in (MemoryLevel.WEIGHTS, MemoryLevel.GRAPHS):
            core.runner.offload_weights()
        self.released = level

    def restore(self) -> None:
        if self.released is None:
            return
        runner = self._core.runner
        if self.released is not MemoryLevel.KV:
            runner.reload_weights()
        runner.allocate_cache(self._core.scheduler.blocks.num_blocks)
        self._core.builder.forget()
        self.released = None

    # --- weights -----------------------------------------------------------------------------------------

    def update(
        self, tensors: NamedTensors, version: PolicyVersion, partial: bool, fence: Callable[[], None]
    ) -> None:
        """`fence`: lets the device wait until the tensors are whole."""
        core = self._core
        if version <= core.version:  # nothing was touched: what is in service stays so
            raise WeightSyncError(
                f"the engine has version {core.version} and was given {version}: versions only grow"
            )
        core.drain()
        core.preempt_all()
        core.scheduler.blocks.flush()
        fence()
        try:
            self._take_weights(tensors, partial=partial)
        except BaseException:
            # Only now: a request that arrives while an update goes well waits for it like any other command.
            self.unavailable = f"the update to version {version} failed"
            raise
        core.version = version
        if not partial:
            self.unavailable = None

    def rewind(self) -> None:
        self._core.version = PolicyVersion(0)

    def _take_weights(self, tensors: NamedTensors, *, partial: bool) -> None:
        runner = self._core.runner
        if self.released not in (None, MemoryLevel.KV):
            runner.reload_weights()
            self._targets.copy(tensors, partial=partial)
            runner.offload_weights()
        else:
            self._targets.copy(tensors, partial=partial)
        runner.finish_update()

    # --- adapters ----------------------------------------------------------------------------------------

    def load_adapter(self, name: str, tensors: AdapterTensors) -> None:
        core = self._core
        core.drain()
        for seq in [s for s in core.scheduler.running if s.request.adapter == name]:
            core.scheduler.preempt(seq)  # what it has in the cache came from the adapter's old weights
        core.runner.adapters.load(name, tensors)

    def unload_adapter(self, name: str) -> None:
        core = self._core
        core.abort([i for i, seq in core.live.items() if seq.request.adapter == name])
        core.runner.adapters.unload(name)
