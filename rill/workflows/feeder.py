"""The feeder: a worker that keeps the engines fed and forms the batches, so that the driver never sees a single group.

             ┌────────────── feeder (one process) ───────────────┐
    data ──▶ │ admit ──▶ running ──▶ kept ──▶ batch ──▶ StepPlan │ ──▶ driver, once a step
             └───┬───────────▲───────────────────────────────────┘
               jobs       outcomes        (channels)
                 └─▶ rollout workers ─┘

Two threads. `_run` takes outcomes and admits what they make room for, all the time, so that generation goes on while
the loop waits for training. The main thread serves the loop: `take_batch` unblocks when enough kept groups have come
in, or when `_run` has failed; a step that was trained raises the capacity. What they share is the GroupBuffer, under
`_changed`.

An epoch of the jobs channel lasts a step where max_lag is 0: `take_batch` opens it, and ends it once the batch is
full, so that engines let go of their devices. Otherwise it lasts for the run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import pickle
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from rill.config import PartConfig
from rill.data.base import Split, open_dataset, open_indexed
from rill.data.curriculum import Curriculum, CurriculumConfig
from rill.data.loader import LoaderConfig, PromptSource, open_loader
from rill.errors import CheckpointError, StuckError
from rill.runtime.channel import Channel
from rill.runtime.worker import Worker, concurrent
from rill.telemetry.run import write_atomically
from rill.types import PolicyVersion, Sample
from rill.workflows.admission import Admission
from rill.workflows.curriculum import CurriculumSource
from rill.workflows.group_buffer import GroupBuffer
from rill.workflows.jobs import Outcome, StepPlan, Untrained
from rill.workflows.sections import LoopConfig

log = logging.getLogger(__name__)

STATE_FILE, GROUPS_FILE = "state.json", "groups.pickle"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlan:
    """Where prompts come from; opened in the feeder's process."""

    data: PartConfig
    loader: LoaderConfig
    curriculum: CurriculumConfig | None = None

    def open(self) -> PromptSource:
        if self.curriculum is None:
            return open_loader(open_dataset(self.data, Split.TRAIN), self.loader)
        return CurriculumSource(Curriculum(open_indexed(self.data, Split.TRAIN), self.curriculum))


class Collected(NamedTuple):
    """A batch: what trainers must know of it, and its figures."""

    plan: StepPlan
    figures: Mapping[str, float]


class Feeder(Worker):
    def __init__(self, *, prompts: PromptPlan, config: LoopConfig, group_size: int) -> None:
        self.config = config
        self.admission = admission_of(config)
        self.buffer = GroupBuffer(
            self.admission,
            prompts.open(),
            group_size=group_size,
            in_admission_order=config.order == "admission",
            max_returns=config.max_returns,
            max_dropped=config.max_refills * config.groups_per_step,
        )
        self._changed = threading.Condition()
        self._is_open = False
        self._failure: Exception | None = None
        self._restored: dict[str, Sample] = {}
        """Of a checkpoint: they lie in the rollouts channel again once that is there."""

    def start(self, jobs: Channel, rollouts: Channel, outcomes: Channel) -> None:
        """Take outcomes from now on."""
        self._jobs, self._rollouts, self._outcomes = jobs, rollouts, outcomes
        self._put_samples(self._restored)
        self._restored = {}
        threading.Thread(target=self._run, name="feeder", daemon=True).start()

    def take_batch(self, num_trained: int) -> Collected:
        """The next batch, after `num_trained` steps. Raises StuckError when it does not come together in time."""
        self.trained(num_trained)
        timeout_s = self.config.step_timeout_s
        with self._changed:
            self._is_open = True
            self._admit()
            if not self._changed.wait_for(lambda: self._failure or self.buffer.is_ready, timeout_s):
                raise StuckError(f"after {timeout_s:.0f} s {self.buffer.describe()}")
            if self._failure is not None:
                raise self._failure
            batch, dropped, num_returned = self.buffer.take_batch()
            step = self.admission.version
        if self.config.max_lag == 0:
            self._end_epoch()
        version = PolicyVersion(step + 1)  # 0 is what engines load by themselves
        figures = {**summarise(batch, dropped, version), "groups/put_back": float(num_returned)}
        if isinstance(self.buffer.source, CurriculumSource):
            figures |= self.buffer.source.metrics()
        return Collected(plan=StepPlan.of(batch, step=step, version=version), figures=figures)

    def trained(self, num_trained: int) -> None:
        """So many steps are applied, and the engines have their weights: what is admitted now is made with them. Asking
        for a batch says it too; the loop says it by itself where it has other things to do before."""
        with self._changed:
            if num_trained == self.admission.version:
                return
            assert num_trained == self.admission.version + 1, "steps are applied one by one"
            if self.config.max_lag == 0:
                self._wait_for_put_back()
            self.buffer.trained()
            self._admit()

    def finish(self) -> None:
        """Admit no more and let the engines' loops end once they have finished what they hold."""
        if self._is_open:
            self._end_epoch()

    @concurrent
    def counts(self) -> dict[str, int]:
        """How many groups run, were accepted and dropped, and the step that the run stands at."""
        with self._changed:
            return asdict(self.admission)

    # --- files --------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        """Between two steps. The groups' file first: the state names its checksum."""
        with self._changed:
            if not self._is_open:
                self._wait_for_put_back()
            state, untrained = self.buffer.state()
        groups = pickle.dumps((untrained, self._copy_samples(untrained)))
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        (place / GROUPS_FILE).write_bytes(groups)
        write_atomically(place / STATE_FILE, json.dumps({**state, "groups_sha256": _sha256(groups)}))

    def load(self, folder: str) -> None:
        place = Path(folder)
        try:
            state = json.loads((place / STATE_FILE).read_text(encoding="utf-8"))
            groups = (place / GROUPS_FILE).read_bytes()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{place} cannot be read: {error}") from error
        if _sha256(groups) != state["groups_sha256"]:
            raise CheckpointError(
                f"{place / GROUPS_FILE} is damaged: its checksum is not the one in {STATE_FILE}"
            )
        untrained, self._restored = pickle.loads(groups)
        self.buffer.load_state(state, untrained)

    # --- inside -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for outcome in self._outcomes:  # for as long as the process lives
                with self._changed:
                    is_awaited = self.buffer.collect(outcome)
                    self._admit()
                    self._changed.notify_all()
                if not is_awaited:
                    log.warning(
                        "%s was done a second time, by %s: discarded", outcome.group_id, outcome.maker
                    )
                    if outcome.lengths:
                        self._rollouts.take(keys=outcome.keys)
        except Exception as error:  # noqa: BLE001  boundary: handed to whoever waits for a batch
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _admit(self) -> None:
        """Called under the lock: two threads admitting must not interleave their jobs."""
        if self._is_open and (jobs := self.buffer.admit()):
            self._jobs.put_many(jobs)

    def _copy_samples(self, untrained: Untrained) -> dict[str, Sample]:
        """The samples of groups that wait to be trained on, by key. They are taken out of the channel and put back."""
        keys = [key for _, outcome in untrained.kept for key in outcome.keys]
        if not keys:
            return {}
        samples: dict[str, Sample] = dict(zip(keys, self._rollouts.take(keys=keys), strict=True))
        self._put_samples(samples)
        return samples

    def _put_samples(self, samples: Mapping[str, Sample]) -> None:
        for key, sample in samples.items():
            self._rollouts.put(sample, weight=float(sample.num_tokens), key=key)

    def _end_epoch(self) -> None:
        with self._changed:
            self._is_open = False
        self._jobs.end()

    def _wait_for_put_back(self) -> None:
        """Engines have ended their epoch, so every outcome is on its way here: the next batch begins with what was put
        back, and a checkpoint holds it."""
        timeout_s = self.config.step_timeout_s
        if not self._changed.wait_for(lambda: self._failure or self.buffer.num_running == 0, timeout_s):
            raise StuckError(f"{self.buffer.num_running} groups were not put back within {timeout_s:.0f} s")


def admission_of(config: LoopConfig) -> Admission:
    extra = math.ceil(config.overprovision * config.groups_per_step)
    return Admission(
        batch_groups=config.groups_per_step,
        max_lag=config.max_lag,
        max_concurrent=config.max_concurrent_groups or (config.max_lag + 1) * config.groups_per_step + extra,
        num_steps=config.steps,
        extra_groups=extra,
    )


def summarise(
    batch: Sequence[Outcome], dropped: Sequence[Outcome], version: PolicyVersion
) -> dict[str, float]:
    """Figures of a batch trained from `version`; each group counts by its number of samples."""
    weight = sum(len(outcome.lengths) for outcome in batch)
    figures: dict[str, float] = {}
    for name in sorted({name for outcome in batch for name in outcome.metrics}):
        figures[name] = sum(o.metrics.get(name, 0.0) * len(o.lengths) for o in batch) / weight
    lags = [int(version) - int(outcome.oldest_version) for outcome in batch]
    figures["lag/mean"] = sum(lags) / len(lags)
    figures["lag/max"] = float(max(lags))
    figures["groups/kept"] = float(len(batch))
    figures["groups/dropped"] = float(len(dropped))
    for reason, count in Counter(outcome.dropped for outcome in dropped).items():
        figures[f"groups/dropped_{reason}"] = float(count)
    return figures


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
