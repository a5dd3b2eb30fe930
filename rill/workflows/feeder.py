"""Keeps the engines fed: admits jobs while there is capacity and collects what becomes of them.

    source ──▶ admit ──▶ jobs channel ──▶ rollout workers ──▶ outcomes channel ──▶ collect ──▶ take_batch()
                 ▲  capacity (rill.workflows.admission)                               │
                 └────────────── a finished or dropped group frees its place ◀────────┘

One thread of its own runs admit and collect, so that generation goes on while the loop waits for training.
`take_batch` unblocks when enough kept groups have come in, or when the thread has failed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rill.errors import RillError, RunError, StuckError
from rill.runtime.channel import Channel
from rill.types import Prompt
from rill.workflows.admission import Admission
from rill.workflows.jobs import GroupJob, Outcome, in_batch_order

STOP_WAIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """A batch's worth of outcomes, and the dropped ones that came in since the batch before."""

    outcomes: tuple[Outcome, ...]
    dropped: tuple[Outcome, ...]
    wait_s: float

    @property
    def drop_reasons(self) -> Counter[str]:
        return Counter(outcome.dropped for outcome in self.dropped if outcome.dropped is not None)


class Feeder:
    def __init__(
        self,
        admission: Admission,
        *,
        next_prompts: Callable[[int], Sequence[Prompt]],
        group_size: int,
        jobs: Channel,
        outcomes: Channel,
        in_admission_order: bool,
        on_outcome: Callable[[Outcome], None] | None = None,
    ) -> None:
        self.admission = admission
        self._next_prompts = next_prompts
        self._group_size = group_size
        self._jobs = jobs
        self._outcomes = outcomes
        self._in_admission_order = in_admission_order
        self._on_outcome = on_outcome
        self._next_index = admission.version * admission.batch_groups
        self._kept: list[Outcome] = []
        self._dropped: list[Outcome] = []
        self._running_indices: set[int] = set()
        self._changed = threading.Condition()
        self._is_open = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def open_epoch(self) -> None:
        """Admit from now on."""
        with self._changed:
            self._is_open = True
        self._admit()

    def close_epoch(self) -> None:
        """Admit no more and let the engines' loops end once they have finished what they hold."""
        with self._changed:
            self._is_open = False
        self._jobs.end()

    def take_batch(self, timeout_s: float) -> Collected:
        """The next batch, in batch order. Raises StuckError when it does not come together in time."""
        began = time.monotonic()
        with self._changed:
            ready = self._changed.wait_for(lambda: self._failure or len(self._ready()) > 0, timeout_s)
            if self._failure is not None:
                raise self._failure
            if not ready:
                raise StuckError(
                    f"after {timeout_s:.0f} s only {len(self._kept)} of {self.admission.batch_groups} groups of step "
                    f"{self.admission.version} are finished ({self.admission.running} running, "
                    f"{len(self._dropped)} dropped by filters since the last step)"
                )
            batch = self._ready()
            chosen = {outcome.group_id for outcome in batch}
            self._kept = [outcome for outcome in self._kept if outcome.group_id not in chosen]
            dropped, self._dropped = tuple(self._dropped), []
        return Collected(outcomes=in_batch_order(batch), dropped=dropped, wait_s=time.monotonic() - began)

    def trained(self) -> None:
        """A step was applied: the version grows, and with it the capacity."""
        with self._changed:
            self.admission.trained()
        self._admit()

    @property
    def num_ready(self) -> int:
        return len(self._kept)

    def stop(self) -> None:
        self._outcomes.end()
        self._thread.join(timeout=STOP_WAIT_S)

    def _ready(self) -> list[Outcome]:
        """A whole batch of kept outcomes, or nothing."""
        size = self.admission.batch_groups
        if len(self._kept) < size:
            return []
        if not self._in_admission_order:
            return self._kept[:size]
        oldest_first = sorted(self._kept, key=lambda outcome: outcome.index)[:size]
        # A group admitted earlier may still be running; wait for it unless a filter has dropped it.
        oldest_running = min(self._running_indices, default=oldest_first[-1].index + 1)
        return oldest_first if oldest_first[-1].index < oldest_running else []

    def _run(self) -> None:
        try:
            for outcome in self._outcomes:  # until stop() ends the epoch
                self._collect(outcome)
                self._admit()
        except RillError as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _collect(self, outcome: Outcome) -> None:
        with self._changed:
            self._running_indices.discard(outcome.index)
            self.admission.finish(kept=outcome.dropped is None)
            (self._kept if outcome.dropped is None else self._dropped).append(outcome)
            self._changed.notify_all()
        if self._on_outcome is not None:
            self._on_outcome(outcome)

    def _admit(self) -> None:
        with self._changed:
            if not self._is_open:
                return
            count = self.admission.capacity
            if count == 0:
                return
            prompts = self._next_prompts(count)
            if not prompts:
                raise RunError("the dataset has no more prompts: raise `data.epochs` or lower `loop.steps`")
            jobs = [self._job(prompt) for prompt in prompts]
            self.admission.admit(len(jobs))
            self._running_indices.update(job.index for job in jobs)
            # Put while holding the lock: two threads admitting must not interleave their jobs.
            self._jobs.put_many(jobs)

    def _job(self, prompt: Prompt) -> GroupJob:
        index = self._next_index
        self._next_index += 1
        return GroupJob(id=f"g{index:08d}", index=index, prompt=prompt, group_size=self._group_size)
