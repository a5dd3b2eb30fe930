"""Keeps the engines fed: admits jobs while there is capacity and collects what becomes of them.

    source ──▶ admit ──▶ jobs channel ──▶ rollout workers ──▶ outcomes channel ──▶ collect ──▶ take_batch()
                 ▲  capacity (rill.workflows.admission)                               │
                 └────────────── a finished or dropped group frees its place ◀────────┘

One thread of its own runs admit and collect, so that generation goes on while the loop waits for training.
`take_batch` unblocks when enough kept groups have come in, or when the thread has failed.

Every admitted group is trained on once or dropped once. A worker that dies may have finished a group whose lease it
could not end, so that another does it again: the second outcome is not counted and its samples are discarded. `state`
holds the jobs that are admitted and not yet trained on; a resumed run does those first, under their old names.
"""

from __future__ import annotations

import base64
import logging
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rill.data.loader import PromptSource
from rill.errors import RunError, StuckError
from rill.runtime.channel import Channel
from rill.types import Prompt
from rill.workflows.admission import Admission
from rill.workflows.jobs import GroupJob, Outcome, in_batch_order

log = logging.getLogger(__name__)

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
        source: PromptSource,
        group_size: int,
        jobs: Channel,
        outcomes: Channel,
        in_admission_order: bool,
        discard: Callable[[Outcome], None],
        on_outcome: Callable[[GroupJob, Outcome], None] | None = None,
    ) -> None:
        """`discard` takes the samples of an outcome out of the rollouts channel. `on_outcome` hears of every group that
        counts, once, before anything is admitted in its place."""
        self.admission = admission
        self._source = source
        self._group_size = group_size
        self._jobs = jobs
        self._outcomes = outcomes
        self._in_admission_order = in_admission_order
        self._discard = discard
        self._on_outcome = on_outcome
        self._next_index = 0
        self._to_repeat: list[GroupJob] = []
        self._running: dict[int, GroupJob] = {}
        self._finished: dict[int, GroupJob] = {}
        """Kept and not yet trained on."""
        self._kept: list[Outcome] = []
        self._dropped: list[Outcome] = []
        self._in_training: tuple[Outcome, ...] = ()
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
            self._in_training = in_batch_order(batch)
        return Collected(outcomes=self._in_training, dropped=dropped, wait_s=time.monotonic() - began)

    def trained(self) -> None:
        """A step was applied: the version grows, and with it the capacity."""
        with self._changed:
            self.admission.trained()
            for outcome in self._in_training:
                del self._finished[outcome.index]
            self._in_training = ()
        self._admit()

    def stop(self) -> None:
        self._outcomes.end()
        self._thread.join(timeout=STOP_WAIT_S)

    # --- state --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything a resumed run needs to go on with the same groups; JSON."""
        with self._changed:
            untrained = {**self._running, **self._finished, **{job.index: job for job in self._to_repeat}}
            jobs = [untrained[index] for index in sorted(untrained)]
            return {
                "admission": self.admission.state(),
                "source": self._source.state(),
                "next_index": self._next_index,
                "untrained": base64.b64encode(pickle.dumps(jobs)).decode(),
            }

    def load_state(self, state: dict[str, Any]) -> None:
        """Before start()."""
        self.admission.load_state(state["admission"])
        self._source.load_state(state["source"])
        self._next_index = state["next_index"]
        self._to_repeat = pickle.loads(base64.b64decode(state["untrained"]))

    # --- inside -------------------------------------------------------------------------------------------

    def _ready(self) -> list[Outcome]:
        """A whole batch of kept outcomes, or nothing."""
        size = self.admission.batch_groups
        if len(self._kept) < size:
            return []
        if not self._in_admission_order:
            return self._kept[:size]
        oldest_first = sorted(self._kept, key=lambda outcome: outcome.index)[:size]
        # A group admitted earlier may still be running; wait for it unless a filter has dropped it.
        waiting = [*self._running, *(job.index for job in self._to_repeat)]
        oldest_running = min(waiting, default=oldest_first[-1].index + 1)
        return oldest_first if oldest_first[-1].index < oldest_running else []

    def _run(self) -> None:
        try:
            for outcome in self._outcomes:  # until stop() ends the epoch
                self._collect(outcome)
                self._admit()
        except Exception as error:  # noqa: BLE001  boundary: handed to whoever waits for a batch
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _collect(self, outcome: Outcome) -> None:
        with self._changed:
            job = self._running.pop(outcome.index, None)
            if job is not None:
                self.admission.finish(kept=outcome.dropped is None)
                if outcome.dropped is None:
                    self._kept.append(outcome)
                    self._finished[outcome.index] = job
                else:
                    self._dropped.append(outcome)
                if self._on_outcome is not None:
                    self._on_outcome(job, outcome)
                self._changed.notify_all()
        if job is None:
            log.warning("%s was done a second time, by %s: discarded", outcome.group_id, outcome.maker)
            self._discard(outcome)

    def _admit(self) -> None:
        with self._changed:
            if not self._is_open:
                return
            count = self.admission.capacity
            if count == 0:
                return
            jobs, self._to_repeat = self._to_repeat[:count], self._to_repeat[count:]
            jobs += [self._job(prompt) for prompt in self._source.next(count - len(jobs))]
            if not jobs:
                raise RunError("the dataset has no more prompts: raise `data.epochs` or lower `loop.steps`")
            self.admission.admit(len(jobs))
            self._running.update((job.index, job) for job in jobs)
            # Put while holding the lock: two threads admitting must not interleave their jobs.
            self._jobs.put_many(jobs)

    def _job(self, prompt: Prompt) -> GroupJob:
        index = self._next_index
        self._next_index += 1
        return GroupJob(id=f"g{index:08d}", index=index, prompt=prompt, group_size=self._group_size)
