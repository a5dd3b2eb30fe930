"""The flow: what a workflow's `step` writes down, turned into calls that run at the same time.

    answers = flow.sample(self.rollout)             prompts are admitted, as far ahead as the lag allows, and answered
    batch = flow.select(answers)                    the batch of this step, as it comes together
    batch = flow.through(self.reference, batch)     a group adds something to every sample
    flow.update(self.actor, batch)                  train on it; engines come to version + 1

Every line is one call on a group and returns at once. The groups' loops wait for each other through channels: a line's
`Stream` is the channel that the samples come out of. Where lines meet for the first time, an edge is made
(rill.workers.edges) with the granularity that the plan gives it, and the controller learns of it; after that a step
costs the driver one call a line. Nothing here knows what the groups compute.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from rill.runtime.channel import Channel
from rill.runtime.group import WorkerGroup
from rill.runtime.handle import Handle
from rill.runtime.process.call import Sealed
from rill.types import PolicyVersion
from rill.workers.edges import Edge
from rill.workflows.config import FlowConfig
from rill.workflows.controller import Batch
from rill.workflows.fleet import TEND_S, Fleet


class Stream(NamedTuple):
    """The samples of a batch on their way."""

    samples: Channel
    upstream: tuple[str, ...]
    """Lines that they have passed, "reference.score"; the first is the engines' group."""


class Line(NamedTuple):
    """What was made for a line of the step when it was met for the first time."""

    edge: Sealed
    target: Channel
    is_whole: bool
    """It waits for its whole batch."""


class Flow:
    """One run's. `begin` and `end` are the loop's, the rest is for a workflow's `step`."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.session = fleet.session
        self.version = PolicyVersion(0)
        """That the step starts from: 1 is the trainer's first; 0 is what engines load by themselves."""
        self.config = self.session.config.flow
        self._loop = self.session.config.loop
        self._lines: dict[str, Line] = {}
        self._selected: Handle | None = None
        self._calls: list[Handle] = []
        """Of the step."""

    # --- what a step says ---------------------------------------------------------------------------------

    def sample(self, engines: WorkerGroup[Any]) -> Stream:
        """Let prompts be admitted, as far ahead as the lag allows, and answered: episodes run against the engines, and
        finished groups come out."""
        if not self.fleet.is_open:
            self.fleet.open_epoch()
        return Stream(self.session.flows.samples, (engines.name,))

    def select(self, answers: Stream) -> Stream:
        """The batch of this step: whole groups that the filter keeps, until it is full."""
        self._selected = self.session.groups["controller"].select(int(self.version) - 1)
        return answers

    def through(
        self, group: WorkerGroup[Any], batch: Stream, method: str = "score", *, follows: bool = False
    ) -> Stream:
        """Let every sample pass `group`, which adds something to it. `follows`: under the weights that the step starts
        from, which the group pulls first."""
        line = self._line(group, batch, method)
        weights = (self.fleet.manifest(),) if follows else ()
        self._calls.append(group.call(method, line.edge, line.target, *weights))
        return Stream(line.target, (*batch.upstream, f"{group.name}.{method}"))

    def update(self, group: WorkerGroup[Any], batch: Stream) -> None:
        """Train on the batch, then bring the engines to version + 1: they pull, flush their caches and prove that they
        compute what the trainer computes."""
        edge = self._line(group, batch, "train").edge
        self._calls.append(group.train(edge, self.version))

    # --- the loop's ---------------------------------------------------------------------------------------

    def begin(self, version: PolicyVersion) -> None:
        """Before a step's lines."""
        self.version = version
        self._calls, self._selected = [], None

    def rewire(self, config: FlowConfig) -> None:
        """Between two steps: other chunks, or the same ones to groups that are on other devices now. The next step
        meets all its lines anew."""
        self.config = config
        self._lines.clear()

    def batch(self) -> Batch:
        """Wait for the batch to be full, and for the engines to let go of their devices if this step is an epoch: one
        call of theirs lasts a step when synchronous, otherwise the whole run. Engines are looked after meanwhile."""
        assert self._selected is not None, "a step selects a batch"
        is_epoch, overprovision = self._loop.max_lag == 0, self._loop.overprovision
        if not is_epoch:
            self.fleet.tend()  # the batch may be full already
        # The engines' calls end right behind the batch: whoever waits for them first wakes up once.
        sampling = self.fleet.sampling() if is_epoch and not overprovision else None
        for call in filter(None, (sampling, self._selected)):
            while not (self._selected.done() or call.ended(TEND_S)):
                self.fleet.tend()
                self._raise_failed()
        batch: Batch = self.session.ask(self._selected)
        if is_epoch:
            if overprovision:
                self.fleet.stop(batch.epoch)
            self.fleet.end_epoch()
        return batch

    def end(self) -> dict[str, float]:
        """Wait for the step to be applied and the engines to be brought to it; metrics of all its calls, each the mean
        of its ranks. Publishing is a call of its own: engines that run ahead and are lost meanwhile are back before,
        and a broadcast never waits for the dead. For engines that rest it is posted right behind the training."""
        metrics: dict[str, float] = {}
        full_s = time.monotonic()
        *before, training = self._calls
        for call in before:
            metrics |= self._metrics(call)
        version = PolicyVersion(self.version + 1)
        posted = None if self.fleet.is_open else self.session.groups["actor"].publish(version)
        metrics |= self._metrics(training, posted)
        metrics |= self.fleet.publish(version, posted)
        metrics["time/train_s"] = time.monotonic() - full_s - metrics["time/sync_s"]
        return metrics

    def _metrics(self, call: Handle, behind: Handle | None = None) -> dict[str, float]:
        """Of a call, once it has ended, or another `behind` it. Engines that run ahead are looked after meanwhile: one
        that is lost is back, with the weights that the others hold, before the next ones."""
        deadline_s = time.monotonic() + self._loop.step_timeout_s
        while time.monotonic() < deadline_s and not (behind or call).ended(TEND_S):
            if self.fleet.is_open:
                self.fleet.tend()
            self._raise_failed()
        rows = call.wait(timeout_s=max(0.0, deadline_s - time.monotonic()))
        return mean_of([row for row in rows if row])

    def _raise_failed(self) -> None:
        """A stage that failed will never hand its samples on: nobody need wait for the batch."""
        for call in self._calls:
            for outcome in call.so_far():
                if outcome is not None and outcome.error is not None:
                    raise outcome.error

    def _line(self, group: WorkerGroup[Any], batch: Stream, method: str) -> Line:
        name, session = f"{group.name}.{method}", self.session
        if name in self._lines:
            return self._lines[name]
        edge = Edge(
            name=name,
            samples=batch.samples,
            announced=tuple(session.channel(f"{name}[{rank}]") for rank in range(group.size)),
            num_shares=session.ask(group.on(0).num_shares()),
            granularity=self.config.granularity_of(group.name, self._loop.prompts_per_step),
            is_whole=self._waits_for_all(group.name, batch.upstream),
        )
        session.ask(session.groups["controller"].connect(edge))
        line = self._lines[name] = Line(Sealed(edge), session.channel(f"{name} samples"), edge.is_whole)
        return line

    def _waits_for_all(self, group: str, upstream: Sequence[str]) -> bool:
        """Whether one that it takes turns with may be at work when its first chunk comes. Behind a line that has waited
        for all of its own, those before that one are done."""
        for name in reversed(upstream):
            if self.session.take_turns(group, name.partition(".")[0]):
                return True
            if name in self._lines and self._lines[name].is_whole:
                return False
        return False


def mean_of(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of metrics by name, over the ranks of a group."""
    if len(rows) == 1:
        return dict(rows[0])
    return {name: fmean(row[name] for row in rows) for name in (rows[0] if rows else ())}
