"""Every group between its prompt and its training step: what is begun next, what runs, what makes the next batch.

    source ──▶ admit ──▶ running ──▶ kept ──▶ batch ──▶ trained
                 ▲          ├──▶ dropped by a filter: its place is free again
                 └── put ◀──┘    unfinished when the batch was full: goes on first, with what was said

Owned by the feeder, under its lock; no channels and no threads here. Every admitted group is trained on once or dropped
once. A worker that dies may have finished a group whose lease it could not end, so that another does it again: the
second outcome is not counted. `state` holds what is not yet trained on: a resumed run trains on the groups that were
finished, and does first, under their old names, those that were begun; behind what was said of them, where they were
put back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rill.data.loader import PromptSource
from rill.errors import RunError
from rill.workflows.admission import Admission
from rill.workflows.curriculum import CurriculumSource
from rill.workflows.jobs import GroupJob, Outcome, Untrained


class GroupBuffer:
    def __init__(
        self,
        admission: Admission,
        source: PromptSource,
        *,
        group_size: int,
        in_admission_order: bool,
        max_returns: int = 0,
        max_dropped: int = 0,
    ) -> None:
        """A group that was put back `max_returns` times is waited for. A batch that is not full when filters have
        dropped `max_dropped` groups is given up (0: never)."""
        self.admission = admission
        self.source = source
        self._group_size = group_size
        self._in_admission_order = in_admission_order
        self._max_returns = max_returns
        self._max_dropped = max_dropped
        self._next_index = 0
        self._to_repeat: list[GroupJob] = []
        self._running: dict[int, GroupJob] = {}
        self._finished: dict[int, GroupJob] = {}
        """Kept and not yet trained on."""
        self._kept: list[Outcome] = []
        self._dropped: list[Outcome] = []
        self._num_returned = 0
        self._in_training: Sequence[Outcome] = ()

    def admit(self) -> list[GroupJob]:
        """The groups that are begun now: those begun before first, then new ones, as many as there is room for."""
        count = self.admission.capacity
        if count == 0:
            return []
        jobs, self._to_repeat = self._to_repeat[:count], self._to_repeat[count:]
        for prompt in self.source.next(count - len(jobs)):
            jobs.append(GroupJob(index=self._next_index, prompt=prompt, group_size=self._group_size))
            self._next_index += 1
        if not jobs:
            raise RunError("the dataset has no more prompts: raise `data.epochs` or lower `loop.steps`")
        self.admission.admit(len(jobs))
        self._running.update((job.index, job) for job in jobs)
        return jobs

    def collect(self, outcome: Outcome) -> bool:
        """Take note of what became of a group; False where nobody waits for it."""
        job = self._running.pop(outcome.index, None)
        if job is None:
            return False
        if outcome.returned is not None:
            self.admission.put_back()
            self._num_returned += 1
            again = replace(job, answers=outcome.returned, num_returns=job.num_returns + 1)
            self._to_repeat = sorted([*self._to_repeat, again], key=lambda each: each.index)
            return True
        self.admission.finish(kept=outcome.is_kept)
        if outcome.is_kept:
            self._kept.append(outcome)
            self._finished[outcome.index] = job
        else:
            self._dropped.append(outcome)
            self._check_dropped()
        if isinstance(self.source, CurriculumSource):
            self.source.learn(job, outcome)
        return True

    @property
    def is_ready(self) -> bool:
        return len(self._ready()) > 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    def take_batch(self) -> tuple[Sequence[Outcome], Sequence[Outcome], int]:
        """The groups to train on now; those dropped, and how many were put back, since the batch before."""
        batch = self._ready()
        assert batch, "no batch is ready"
        chosen = {outcome.index for outcome in batch}
        self._kept = [outcome for outcome in self._kept if outcome.index not in chosen]
        dropped, self._dropped = self._dropped, []
        num_returned, self._num_returned = self._num_returned, 0
        self._in_training = batch
        return batch, dropped, num_returned

    def trained(self) -> None:
        """A step was applied: the version grows, and with it the capacity."""
        self.admission.trained()
        for outcome in self._in_training:
            del self._finished[outcome.index]
        self._in_training = ()

    def describe(self) -> str:
        """For the error of a batch that does not come together."""
        return (
            f"only {len(self._kept)} of {self.admission.batch_groups} groups of step {self.admission.version} are "
            f"finished ({self.admission.running} running, {len(self._dropped)} dropped by filters since the last step)"
        )

    def state(self) -> tuple[dict[str, Any], Untrained]:
        """What can be written as JSON, and the groups that are not trained on. Between two steps."""
        assert not self._in_training
        begun = sorted([*self._running.values(), *self._to_repeat], key=lambda job: job.index)
        kept = [(self._finished[outcome.index], outcome) for outcome in self._kept]
        return {
            "admission": self.admission.state(),
            "source": self.source.state(),
            "next_index": self._next_index,
        }, Untrained(begun=begun, kept=kept)

    def load_state(self, state: dict[str, Any], untrained: Untrained) -> None:
        """Before the first admission."""
        self.admission.load_state(state["admission"])
        self.source.load_state(state["source"])
        self._next_index = state["next_index"]
        self._to_repeat = list(untrained.begun)
        self._kept = [outcome for _, outcome in untrained.kept]
        self._finished = {job.index: job for job, _ in untrained.kept}

    def _check_dropped(self) -> None:
        if not 0 < self._max_dropped <= len(self._dropped) or self.is_ready:
            return
        reasons = Counter(outcome.dropped for outcome in self._dropped)
        said = ", ".join(f"{reason}: {count}" for reason, count in reasons.most_common())
        raise RunError(
            f"filters dropped {len(self._dropped)} groups ({said}) and kept {len(self._kept)} of the "
            f"{self.admission.batch_groups} that step {self.admission.version} needs. The task may be too hard or too "
            "easy for this model, or the reward may not see the answer: look at the rollouts, loosen "
            "algorithm.filters, or raise loop.max_refills"
        )

    def _ready(self) -> Sequence[Outcome]:
        """A whole batch of kept outcomes, or nothing."""
        size = self.admission.batch_groups
        if len(self._kept) < size:
            return ()
        if not self._in_admission_order:
            if self._max_returns and any(
                job.num_returns >= self._max_returns for job in self._running.values()
            ):
                return ()
            # Those that were put back hold the oldest tokens; otherwise the first to finish.
            return sorted(self._kept, key=lambda outcome: -self._finished[outcome.index].num_returns)[:size]
        oldest_first = sorted(self._kept, key=lambda outcome: outcome.index)[:size]
        # A group admitted earlier may still be running; wait for it unless a filter has dropped it.
        waiting = [*self._running, *(job.index for job in self._to_repeat)]
        oldest_running = min(waiting, default=oldest_first[-1].index + 1)
        return oldest_first if oldest_first[-1].index < oldest_running else ()
