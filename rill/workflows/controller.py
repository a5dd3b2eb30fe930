"""The controller: a worker that admits prompts, collects what became of them, and announces batches chunk by chunk.

             ┌──────────────── controller (one process) ───────────────┐
    data ──▶ │ admit ──▶ running ──▶ kept ──▶ batch ──▶ chunks         │ ── Chunk ──▶ every stage (rill.workers.edges)
             └───┬───────────▲──────────────────────────────┬──────────┘
               tasks      outcomes        (channels)        └── Batch ──▶ driver, once a step
                 └─▶ episodes ─┘

Two threads. `_run` takes outcomes, admits what they make room for and announces the chunks that they complete, all the
time, so that generation and the stages go on whatever the driver does. The main thread serves the driver: `select`
opens the batch of a step and returns when it is full, or when `_run` has failed; `trained` makes room for more. What
they share is the state machine (staleness.py), under `_changed`.

An epoch of the tasks channel lasts a step where max_lag is 0: `select` opens it, and ends it once the batch is full, so
that engines let go of their devices. Otherwise it lasts for the run, or until a checkpoint stops it.
"""

from __future__ import annotations

import itertools
import json
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rill.data.base import Split, open_dataset, open_indexed
from rill.data.curriculum import Curriculum
from rill.data.loader import PromptSource, open_loader
from rill.errors import CheckpointError
from rill.journal.reader import BATCH, CONTROLLER, LogReader
from rill.journal.token_log import TokenLog
from rill.runtime.context import current
from rill.runtime.process.report import stuck
from rill.runtime.worker import Worker, concurrent
from rill.telemetry.run import write_atomically
from rill.types import PolicyVersion
from rill.workers.edges import Edge
from rill.workers.records import TRAIN, Chunk, Flows, Outcome
from rill.workflows.config import OnlineConfig
from rill.workflows.evaluation import Evaluation
from rill.workflows.staleness import Staleness, State

STATE_FILE, GROUPS_FILE = "state.json", "groups.pickle"


class Batch(NamedTuple):
    """A batch that is full, as the driver hears of it."""

    num_samples: int
    num_tokens: int
    epoch: int
    """Of the tasks channel: what may be stopped now."""
    metrics: Mapping[str, float]


class Controller(Worker):
    def __init__(self, *, config: OnlineConfig, run_dir: str) -> None:
        self.config = config.loop
        self.run_dir = Path(run_dir)
        journal = config.journal
        self.journal = TokenLog(self.run_dir, "controller", journal) if journal.enabled else None
        self.evaluation = Evaluation(config.eval.all_sets(config.data))
        self.groups = Staleness(config.loop, open_prompts(config), group_size=config.rollout.group_size)
        self._changed = threading.Condition()
        self._is_open = False
        self._epoch = 0
        self._failure: Exception | None = None
        self._edges: dict[str, tuple[Edge, int]] = {}
        """With the groups of the batch that each was told of."""
        self._batch: list[Outcome] = []

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()

    def start(self, flows: Flows) -> list[str]:
        """Take outcomes from now on. Batches that the run has chosen before, after the step where it stands, are chosen
        again. What is damaged of the token log is returned."""
        self._flows, damages = flows, list[str]()
        if self.journal is not None:
            reader = LogReader(self.run_dir)
            reader.read_all()
            self.groups.chosen_before = chosen_before(
                reader.batches(), self.groups.version, self.groups.batch_size
            )
            damages = reader.damages()
        threading.Thread(target=self._run, name="controller", daemon=True).start()
        return damages

    @concurrent
    def connect(self, edge: Edge) -> None:
        """Announce every batch to this edge too, from the one that is open now on."""
        with self._changed:
            self._edges[edge.name] = (edge, 0)
            self._announce()

    # --- steps --------------------------------------------------------------------------------------------

    def select(self, num_trained: int) -> Batch:
        """Open the batch that follows `num_trained` steps; returns when it is full. StuckError: it did not come
        together in time."""
        self.trained(num_trained)
        with self._changed:
            self._is_open = True
            self.groups.open_batch()
            self._advance()
            self._wait_until(lambda: self.groups.is_full, lambda: f"a batch: {self.groups.describe()}")
            batch, since, step = tuple(self._batch), self.groups.since_last_batch(), self.groups.version
            epoch = self._epoch
        if self.journal is not None:
            self.journal.event(CONTROLLER, f"{BATCH}/{step}", [outcome.index for outcome in batch])
        if self.config.max_lag == 0:
            self._end_epoch()
        metrics = {**summarise(batch, PolicyVersion(step + 1)), **since}
        if isinstance(self.groups.source, Curriculum):
            metrics |= self.groups.source.metrics()
        lengths = [length for outcome in batch for length in outcome.lengths]
        return Batch(num_samples=len(lengths), num_tokens=sum(lengths), epoch=epoch, metrics=metrics)

    def trained(self, num_trained: int) -> None:
        """So many steps are applied, and the engines have their weights: what is admitted now is made with them."""
        with self._changed:
            if num_trained == self.groups.version:
                return
            assert num_trained == self.groups.version + 1, "steps are applied one by one"
            if self.config.max_lag == 0:
                self._wait_for_stopped()
            self.groups.trained()
            self._batch = []
            self._edges = {name: (edge, 0) for name, (edge, _) in self._edges.items()}
            self._advance()

    def resize(self, num_prompts: int) -> None:
        """Between two steps: the batches from now on. A profile looks at several."""
        with self._changed:
            self.groups.config = self.config.model_copy(update={"prompts_per_step": num_prompts})

    def finish(self) -> int:
        """Admit no more and let the episodes' loops end once they have finished what they hold; the epoch it was."""
        epoch = self._epoch
        if self._is_open:
            self._end_epoch()
        return epoch

    @concurrent
    def counts(self) -> dict[str, int]:
        """Groups by state, and the steps that are applied."""
        with self._changed:
            return self.groups.counts()

    def evaluate(self) -> dict[str, float]:
        """Every evaluation set once, through the same channels as training. Where no epoch is open, this is one."""
        with self._changed:
            tasks = self.evaluation.begin(self._epoch)
        if not tasks:
            return {}
        self._flows.tasks.put_many(tasks)
        if not self._is_open:
            self._end_epoch()
        with self._changed:
            self._wait_until(
                lambda: self.evaluation.num_done == len(tasks),
                lambda: f"an evaluation: {self.evaluation.num_done} of {len(tasks)} prompts are done",
            )
            if self.groups.version == 0:
                self.evaluation.check_some_succeeded()
            return self.evaluation.metrics()

    # --- files --------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        """Between two steps. Of what is begun it holds which groups they are: their tokens are in the token log."""
        with self._changed:
            if not self._is_open:
                self._wait_for_stopped()
            state, untrained = self.groups.state(), self.groups.untrained()
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        (place / GROUPS_FILE).write_bytes(pickle.dumps(untrained))
        begun = [task.index for task in untrained]
        write_atomically(place / STATE_FILE, json.dumps({**state, "untrained": begun}))

    def wait_saved(self, timeout_s: float) -> None:
        """It is when `save` returns."""

    def load(self, folder: str) -> None:
        place = Path(folder)
        try:
            state = json.loads((place / STATE_FILE).read_text(encoding="utf-8"))
            untrained = pickle.loads((place / GROUPS_FILE).read_bytes())
        except (OSError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{place} cannot be read: {error}") from error
        self.groups.load_state(state, untrained)

    # --- inside -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for outcome in self._flows.outcomes:  # for as long as the process lives
                with self._changed:
                    (self.groups if outcome.purpose == TRAIN else self.evaluation).collect(outcome)
                    self._advance()
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001  boundary: handed to whoever waits for a batch
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _advance(self) -> None:
        """Under the lock: what is kept may join the batch, and what left may make room for more."""
        self._batch += self.groups.choose()
        self._announce()
        if self._is_open and (tasks := self.groups.admit(self._epoch)):
            self._flows.tasks.put_many(tasks)

    def _announce(self) -> None:
        """Chunks that are complete, in the order in which their groups joined the batch."""
        size = self.groups.batch_size
        for name, (edge, told) in self._edges.items():
            while len(self._batch) - told >= min(edge.granularity, size - told) > 0:
                groups = self._batch[told : told + edge.granularity]
                number, told = told // edge.granularity, told + len(groups)
                edge.announce(Chunk.of(groups, step=self.groups.version, number=number, is_last=told == size))
            self._edges[name] = (edge, told)

    def _end_epoch(self) -> None:
        with self._changed:
            self._is_open = False
            self._epoch += 1
        self._flows.tasks.end()

    def _wait_for_stopped(self) -> None:
        """Episodes have ended their epoch, so every outcome is on its way here: the next batch begins with what was
        stopped, and a checkpoint holds it."""
        self._wait_until(
            lambda: self.groups.num(State.RUNNING) == 0,
            lambda: f"{self.groups.num(State.RUNNING)} groups that were told to stop",
        )

    def _wait_until(self, is_so: Callable[[], bool], what: Callable[[], str]) -> None:
        """Under the lock. A failure of the flows is raised; past the deadline everybody is asked what they wait for."""
        timeout_s = self.config.step_timeout_s
        if not self._changed.wait_for(lambda: self._failure or is_so(), timeout_s):
            raise stuck(current(), what(), timeout_s)
        if self._failure is not None:
            raise self._failure


def open_prompts(config: OnlineConfig) -> PromptSource:
    if config.curriculum is None:
        return open_loader(open_dataset(config.data, Split.TRAIN), config.loader)
    return Curriculum(open_indexed(config.data, Split.TRAIN), config.curriculum)


def chosen_before(batches: Mapping[int, list[int]], step: int, size: int) -> dict[int, list[int]]:
    """The batches from `step` on without a gap, as far as they have the size that batches have now."""
    steps = itertools.takewhile(lambda number: len(batches.get(number, ())) == size, itertools.count(step))
    return {number: batches[number] for number in steps}


def summarise(batch: Sequence[Outcome], version: PolicyVersion) -> dict[str, float]:
    """Metrics of a batch trained from `version`; each group counts by its number of samples."""
    lags = [int(version) - int(o.oldest_version) for o in batch if o.oldest_version is not None] or [0]
    metrics = {
        "lag/mean": sum(lags) / len(lags),
        "lag/max": float(max(lags)),
        "groups/kept": float(len(batch)),
    }
    for name in sorted({name for outcome in batch for name in outcome.metrics}):
        # A group without a reward has none; one without a failure has 0 of them.
        counted = [o for o in batch if name in o.metrics or not name.startswith("reward/")]
        rows = [(o.metrics.get(name, 0.0), len(o.lengths)) for o in counted]
        metrics[name] = sum(value * count for value, count in rows) / max(1, sum(count for _, count in rows))
    return metrics
