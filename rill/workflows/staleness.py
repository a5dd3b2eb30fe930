"""What may be begun, what runs, what makes the next batch: the one controller of staleness. Pure state, no threads.

    source ──▶ RUNNING ──▶ KEPT ──▶ BATCHED ──▶ trained
                 ▲ │ │
                 │ │ └──▶ dropped
                 │ ▼
               RESUMED

| state   | a group enters it when                                      | and leaves it when                          |
|---------|-------------------------------------------------------------|---------------------------------------------|
| RUNNING | it is admitted: there is room, resumed ones first           | an outcome comes: kept, dropped or stopped  |
| RESUMED | it was stopped unfinished, or a checkpoint holds it         | it is admitted again, behind what was said  |
| KEPT    | it is finished and the filter keeps it                      | a batch that is open has room for it        |
| BATCHED | it is chosen: its samples go to the stages, chunk by chunk  | the step is applied                         |
| dropped | the filter drops it                                         | never: counted, its place is free again     |
| trained | the step of its batch is applied                            | never: counted                              |

Staleness is bounded by admission, never by throwing samples away:

    room = min((max_lag + 1) · batch + extra,  steps left · batch) − untrained

`untrained` groups run, are kept or are batched. max_lag 0 is synchronous training: one batch is generated, trained on,
and only then the next begins. `extra` groups are begun beyond a batch so that the slowest need not be waited for: they
are stopped when the batch is full and go on with the next. Nothing is counted from the start of the run, so a resumed
run may have another batch size. Every admitted group is trained on once or dropped once.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from rill.data.curriculum import Curriculum
from rill.data.loader import PromptSource
from rill.errors import RunError
from rill.workers.records import Outcome, Task
from rill.workflows.config import LoopConfig

log = logging.getLogger(__name__)


class State(StrEnum):
    RUNNING = "running"
    RESUMED = "resumed"
    KEPT = "kept"
    BATCHED = "batched"


@dataclass(slots=True)
class Entry:
    """One group that is not trained on yet."""

    task: Task
    outcome: Outcome | None = None
    is_learnt: bool = False
    """The curriculum knows what came of it; a checkpoint that holds it has both."""


class Staleness:
    def __init__(self, config: LoopConfig, source: PromptSource, *, group_size: int) -> None:
        self.config = config
        self.source = source
        self.version = 0
        """Steps that are applied."""
        self._group_size = group_size
        self._next_index = 0
        self._groups: dict[State, dict[int, Entry]] = {state: {} for state in State}
        """In the order in which they came into the state."""
        self._dropped: list[str] = []
        """Why, since the batch before."""
        self._num_dropped = 0
        self._num_trained = 0
        self._num_stopped = 0
        self._is_batch_open = False
        self.chosen_before: dict[int, list[int]] = {}
        """The groups of batches that were trained on once already, by step, where the run goes on from a checkpoint
        before them: they are chosen again, in the same order."""

    @property
    def batch_size(self) -> int:
        """Groups."""
        return self.config.prompts_per_step

    # --- admission ----------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Groups that may be begun now."""
        config = self.config
        ahead = (config.max_lag + 1) * self.batch_size + config.num_extra
        left = (config.steps - self.version) * self.batch_size
        untrained = sum(map(self.num, (State.RUNNING, State.KEPT, State.BATCHED)))
        return max(0, min(ahead, left) - untrained)

    def admit(self, epoch: int) -> list[Task]:
        """The groups that are begun now: stopped ones first, then new ones, as many as there is room for."""
        room = self.room
        if room == 0:
            return []
        tasks = []
        for index in sorted(self._groups[State.RESUMED])[:room]:
            entry = self._move(index, State.RESUMED, State.RUNNING)
            entry.task = replace(entry.task, epoch=epoch)
            tasks.append(entry.task)
        for prompt in self.source.next(room - len(tasks)):
            task = Task(index=self._next_index, prompt=prompt, num_samples=self._group_size, epoch=epoch)
            self._groups[State.RUNNING][task.index] = Entry(task)
            self._next_index += 1
            tasks.append(task)
        if not tasks:
            raise RunError("the dataset has no more prompts: raise `data.epochs` or lower `loop.steps`")
        return tasks

    def collect(self, outcome: Outcome) -> None:
        """Take note of what became of a group."""
        index = outcome.index
        assert index in self._groups[State.RUNNING], f"group {index} is not running"
        if outcome.stopped is not None:
            entry = self._move(index, State.RUNNING, State.RESUMED)
            entry.task = replace(entry.task, progress=outcome.stopped, num_resumes=entry.task.num_resumes + 1)
            self._num_stopped += 1
            return
        entry = self._groups[State.RUNNING][index]
        rewards = [reward for reward in outcome.rewards if not math.isnan(reward)]
        if isinstance(self.source, Curriculum) and rewards and not entry.is_learnt:
            self.source.learn(index, entry.task.prompt, sum(rewards) / len(rewards))
            entry.is_learnt = True
        if outcome.is_kept:
            self._move(index, State.RUNNING, State.KEPT).outcome = outcome
        else:
            del self._groups[State.RUNNING][index]
            self._dropped.append(outcome.dropped or "")
            self._num_dropped += 1
            self._check_dropped()

    # --- batches ------------------------------------------------------------------------------------------

    def open_batch(self) -> None:
        """The next step wants its batch: kept groups may join it from now on."""
        assert not self._groups[State.BATCHED], "the batch before is not trained on"
        self._is_batch_open = True

    def choose(self) -> list[Outcome]:
        """The groups that join the open batch now, in the order in which they join."""
        if not self._is_batch_open:
            return []
        outcomes = []
        for index in self._next()[: self.batch_size - self.num(State.BATCHED)]:
            outcome = self._move(index, State.KEPT, State.BATCHED).outcome
            assert outcome is not None, "what is kept has an outcome"
            outcomes.append(outcome)
        if self.is_full:
            self._is_batch_open = False
        return outcomes

    def _next(self) -> list[int]:
        """The groups that may join now, in order."""
        if before := self.chosen_before.get(self.version):
            missing = before[self.num(State.BATCHED) :]
            chosen = list(itertools.takewhile(lambda index: index in self._groups[State.KEPT], missing))
            if chosen or self._will_come(missing):
                return chosen
            log.warning(
                "the batch of step %d cannot be chosen as it was: the run goes on with another", self.version
            )
            self.chosen_before = {}
        return self._oldest_first() if self.config.order == "admission" else self._first_come()

    def _will_come(self, indices: Sequence[int]) -> bool:
        """Whether these groups are under way, kept, or still to be admitted. A filter may drop one that it kept, where
        a reward answers otherwise the second time."""
        known = {index for groups in self._groups.values() for index in groups}
        is_moving = self.num(State.RUNNING) > 0 or self.room > 0
        return is_moving and all(index in known or index >= self._next_index for index in indices)

    def _oldest_first(self) -> list[int]:
        """A group that was admitted earlier may still be running: it is waited for unless a filter drops it."""
        begun = [*self._groups[State.RUNNING], *self._groups[State.RESUMED]]
        oldest_begun = min(begun, default=self._next_index)
        return [index for index in sorted(self._groups[State.KEPT]) if index < oldest_begun]

    def _first_come(self) -> list[int]:
        """Those that were stopped hold the oldest tokens and go first. Places of the batch are held for those that
        were stopped too often to be stopped again."""
        kept, running = self._groups[State.KEPT], self._groups[State.RUNNING]
        awaited = sum(entry.task.num_resumes >= self.config.max_resumes for entry in running.values())
        free = max(0, self.batch_size - self.num(State.BATCHED) - awaited)
        return sorted(kept, key=lambda index: -kept[index].task.num_resumes)[:free]

    @property
    def is_full(self) -> bool:
        return self.num(State.BATCHED) == self.batch_size

    def since_last_batch(self) -> dict[str, float]:
        """Metrics of what did not get into the batch, once a batch."""
        counts = {"dropped": len(self._dropped), "resumed": self._num_stopped}
        counts |= {f"dropped_{reason}": count for reason, count in Counter(self._dropped).items()}
        self._dropped, self._num_stopped = [], 0
        return {f"groups/{name}": float(count) for name, count in counts.items()}

    def trained(self) -> None:
        """The step of the batch is applied, and the engines have its weights."""
        self.version += 1
        self._num_trained += self.num(State.BATCHED)
        self._groups[State.BATCHED].clear()

    # --- what is known ------------------------------------------------------------------------------------

    def num(self, state: State) -> int:
        return len(self._groups[state])

    def counts(self) -> dict[str, int]:
        """Groups by state, and the steps that are applied."""
        counts = {state.value: self.num(state) for state in State}
        return {**counts, "dropped": self._num_dropped, "trained": self._num_trained, "version": self.version}

    def describe(self) -> str:
        """For the error of a batch that does not come together."""
        finished = self.num(State.BATCHED) + self.num(State.KEPT)
        return (
            f"only {finished} of {self.batch_size} groups of step {self.version} are finished "
            f"({self.num(State.RUNNING)} running, {len(self._dropped)} dropped by filters since the last step)"
        )

    def untrained(self) -> list[Task]:
        """Everything between admission and training, between two steps: what a checkpoint holds besides `state`."""
        assert not self._groups[State.BATCHED], "a checkpoint is taken between two steps"
        begun = {index: entry for groups in self._groups.values() for index, entry in groups.items()}
        return [begun[index].task for index in sorted(begun)]

    def state(self) -> dict[str, Any]:
        """What can be written as JSON."""
        return {
            "version": self.version,
            "dropped": self._num_dropped,
            "trained": self._num_trained,
            "next_index": self._next_index,
            "source": self.source.state(),
            "learnt": [index for group in self._groups.values() for index, e in group.items() if e.is_learnt],
        }

    def load_state(self, state: Mapping[str, Any], untrained: Sequence[Task]) -> None:
        """Before the first admission. What was kept is done again: the token log has its tokens."""
        self.version, self._next_index = state["version"], state["next_index"]
        self._num_dropped, self._num_trained = state["dropped"], state["trained"]
        self.source.load_state(state["source"])
        learnt = set(state.get("learnt", ()))  # a run may have been begun by a rill that did not write it
        self._groups[State.RESUMED] = {
            task.index: Entry(task, is_learnt=task.index in learnt) for task in untrained
        }

    def _move(self, index: int, old: State, new: State) -> Entry:
        entry = self._groups[old].pop(index)
        self._groups[new][index] = entry
        return entry

    def _check_dropped(self) -> None:
        most = self.config.max_refills * self.batch_size
        finished = self.num(State.KEPT) + self.num(State.BATCHED)
        if not 0 < most <= len(self._dropped) or finished >= self.batch_size:
            return
        said = ", ".join(f"{reason}: {count}" for reason, count in Counter(self._dropped).most_common())
        raise RunError(
            f"filters dropped {len(self._dropped)} groups ({said}) and kept {finished} of the {self.batch_size} that "
            f"step {self.version} needs. The task may be too hard or too easy for this model, or the reward may not "
            "see the answer: look at the rollouts, loosen algorithm.filters, or raise loop.max_refills"
        )
