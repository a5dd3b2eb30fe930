"""The profiler: a recipe run for a few short steps, at several batch sizes and on several numbers of devices.

One launch on all devices, everybody sharing them, so that each worker is measured alone; then the same on fewer,
down to one. The last steps of each take a whole batch in small chunks: what a chunk costs besides its items. Sizes that
do not come up (a trainer that does not fit) end the row: the search does not go below what was seen to run.

Workers side by side are slower than each alone, by memory, caches and waits that no profile of single workers holds. So
in the same launch the best plan of each mode is tried for some steps, where it is predicted to be near the best: what
those steps took is in the profile, and decides (`rill.planning.plan.choose`). Plans ahead of training are tried in a
launch each, since how far ahead a run may be is set at launch.

The supervised steps, evaluations and filters of the recipe are left out. Profiles are kept and found again by what they
belong to: the model, the machine, the version of rill, and the recipe's own values.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rill.config.resolve import dump_config
from rill.errors import PlanError, RillError, RunError
from rill.planning.cost import Problem
from rill.planning.pilot import Pilot, Report, Steering
from rill.planning.plan import Plan, ids_text
from rill.planning.profile import DeviceKind, Profile
from rill.planning.recipe import (
    Recipe,
    chunks_of,
    devices_each,
    edges_of,
    identity_of,
    pinned_placement,
    placement_of,
    problem_of,
    profile_of,
    seats_text,
)
from rill.planning.search import Mode, best_of_modes
from rill.runtime.device.device import Device
from rill.telemetry import trace
from rill.telemetry.run import Run, write_atomically

log = logging.getLogger(__name__)

PROFILES = "profiles"
"""Beside the runs."""
SMALLEST_CHUNK = 16
"""Of a batch: plans have no smaller chunks than were measured."""
FIRST_STEPS, TRIED_STEPS = 2, 5
"""Of a plan that is tried: those in which groups have just moved, and those that count."""
NEAR = 1.6
"""Times as long as the best plan's step, as predicted: plans beyond are not tried."""
SETTLE_S = 0.5
"""Until the last calls of a step have told what they did."""


Start = Callable[[Recipe, Run, Pilot], None]
"""Runs a recipe's workflow in a folder."""


def find_profile(
    config: Recipe,
    provenance: Mapping[str, str],
    devices: Sequence[Device],
    *,
    root: Path,
    start: Start,
    num_rounds: int = 1,
    is_fresh: bool = False,
    say: Callable[[str], None] = log.info,
) -> Profile:
    """The stored profile of this recipe on this machine, or a new one, which is stored. `is_fresh`: measure again."""
    identity = identity_of(config, len(devices), "")
    folder = root / PROFILES
    stem = f"{config.workflow}-{identity.workload}-{len(devices)}x{devices[0].kind}"
    if config.loop.max_lag:
        stem += f"-lag{config.loop.max_lag}"  # other plans are tried
    if pinned := [
        f"{name}@{placed.replace(':', '_')}"
        for name, _ in config.placement
        if (placed := pinned_placement(config, provenance, name)) is not None
    ]:
        stem += "-" + "-".join(pinned)  # it was not measured elsewhere
    file = folder / f"{stem}.toml"
    if file.exists() and not is_fresh:
        try:
            stored = Profile.load(file)
            stored.check({name: getattr(identity, name) for name in ("model", "machine", "version")})
        except PlanError as error:
            say(f"{file} is not of this machine and version, so it is measured again ({error})")
        else:
            say(f"profile        {file}")
            return stored
    say(f"profile        measuring {', '.join(_row(config, devices, num_rounds))}")
    began_s = time.monotonic()
    profile = measure(config, provenance, devices, start=start, num_rounds=num_rounds)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(file, profile.dumps())
    say(f"profile        {file}, in {time.monotonic() - began_s:.0f} s")
    return profile


def measure(
    config: Recipe,
    provenance: Mapping[str, str],
    devices: Sequence[Device],
    *,
    start: Start,
    num_rounds: int = 1,
    tries_one: bool = False,
) -> Profile:
    """Run the recipe for a few short steps and give what they took. `tries_one`: also the plan that has no rival."""
    trials = _trials(config, len(devices), num_rounds)
    rows = _Rows(config, provenance, devices, trials, tries_one)
    short = _short(
        config, rows.placement(trials[0].num_devices), len(trials) + len(Mode) * (FIRST_STEPS + TRIED_STEPS)
    )
    with tempfile.TemporaryDirectory(prefix="rill-profile-") as scratch:
        run = Run.create("profile", root=scratch, config_toml=dump_config(short))
        trace.configure(run.path, "driver")
        try:
            with run.running():
                start(short, run, rows)
        except _Enough:
            pass
        except RillError as error:
            if rows.num_rows == 0:
                raise
            log.warning(
                "the profile ends with %d devices, on fewer it failed: %s", rows.fewest, str(error)[:200]
            )
        finally:
            trace.shutdown()
        profile = rows.profile or profile_of(run, config, devices)
    kind = devices[0].kind
    count = {kind: msgspec.structs.replace(profile.devices.get(kind, DeviceKind()), count=len(devices))}
    identity = identity_of(
        config, len(devices), f"{len(trials)} steps on {rows.fewest} to {len(devices)} devices"
    )
    profile = msgspec.structs.replace(
        profile, identity=identity, devices=count, switch_s=rows.switch_s, tried=rows.tried
    )
    return try_ahead(config, provenance, profile, devices, start=start) if config.loop.max_lag else profile


def try_ahead(
    config: Recipe,
    provenance: Mapping[str, str],
    profile: Profile,
    devices: Sequence[Device],
    *,
    start: Start,
) -> Profile:
    """The profile with what a step takes under the plans of a recipe that runs ahead of training."""
    tried = dict(profile.tried)
    for plan in finalists(problem_of(config, provenance, profile, devices)):
        lag = config.loop.max_lag
        steps = _Steps(FIRST_STEPS + lag)
        also = {
            "loop": {"max_lag": lag},
            "flow": {"edges": edges_of(plan)},
            "cluster": {"colocate": plan.staying},
        }
        short = _short(config, placement_of(plan), steps.num_first + TRIED_STEPS + 1, **also)
        with tempfile.TemporaryDirectory(prefix="rill-profile-") as scratch:
            run = Run.create("profile", root=scratch, config_toml=dump_config(short))
            try:
                with run.running():
                    start(short, run, steps)
            except _Enough:
                tried[plan.signature] = statistics.median(steps.times_s[steps.num_first :])
            except RillError as error:
                log.warning("the plan %s is not tried: %s", plan.structure, str(error)[:200])
    return msgspec.structs.replace(profile, tried=tried)


def finalists(problem: Problem, *, least: int = 2) -> list[Plan]:
    """The best plan of each mode that may be the best of all; none where there are fewer than `least`."""
    found = [one for one in best_of_modes(problem).values() if not isinstance(one, str)]
    near_s = NEAR * min(one.step_s for one in found)
    return [Plan.of(problem, one) for one in found if one.step_s <= near_s] if len(found) >= least else []


@dataclass(frozen=True, slots=True)
class Trial:
    """One step of a profile."""

    num_devices: int
    num_prompts: int
    chunk: int = 0
    """Prompts that stages take at a time; 0: all."""


def schedule(
    batch: int, num_devices: int, num_rounds: int, *, smallest_chunk: int = 0, fewest: int = 1
) -> list[Trial]:
    """All devices first, then fewer; on each, a step to warm up, then every size, then a batch in small chunks."""
    some = [max(fewest, round(num_devices**0.5))] if num_devices > 4 else []
    counts = sorted({fewest, num_devices, *some}, reverse=True)
    trials = []
    for count in counts:
        sizes = sorted({max(count, batch // k) for k in (4, 2, 1) if max(count, batch // k) <= batch})
        trials += [Trial(count, size) for size in (sizes[0], *(sizes * num_rounds))]
        if count <= (chunk := max(count, smallest_chunk)) < batch and smallest_chunk:
            trials += [Trial(count, batch, chunk)] * num_rounds
    return trials


def _trials(config: Recipe, num_devices: int, num_rounds: int) -> list[Trial]:
    """With the smallest chunks that a plan may have, where it may have any."""
    batch = config.loop.prompts_per_step
    smallest = 0 if chunks_of(config) == (batch,) else max(1, batch // SMALLEST_CHUNK)
    fewest = max(devices_each(config).values())
    if fewest > num_devices:
        raise PlanError(f"a replica takes {fewest} devices, there are {num_devices}: lower its parallel size")
    return schedule(batch, num_devices, num_rounds, smallest_chunk=smallest, fewest=fewest)


class _Enough(Exception):
    pass


@dataclass
class _Steps:
    """The steps of a plan that is tried, and the pilot of a run that does nothing else."""

    num_first: int = FIRST_STEPS
    times_s: list[float] = field(default_factory=list)

    def median_s(self, report: Report) -> float | None:
        """With this step: what one takes, once there are enough."""
        self.times_s += [report.metrics["time/step_s"]] if "time/step_s" in report.metrics else []
        later = self.times_s[self.num_first :]
        return statistics.median(later) if len(later) == TRIED_STEPS else None

    def after_step(self, steering: Steering, report: Report) -> None:
        if self.median_s(report) is not None:
            raise _Enough


@dataclass
class _Rows:
    """The pilot of a profile: sets up each step before it is taken."""

    config: Recipe
    provenance: Mapping[str, str]
    devices: Sequence[Device]
    trials: Sequence[Trial]
    tries_one: bool
    num_rows: int = 0
    """Numbers of devices that are measured."""
    fewest: int = 0
    switch_s: float = 0.0
    profile: Profile | None = None
    """Of the single workers, once all rows are there."""
    tried: dict[str, float] = field(default_factory=dict)
    _last: Trial | None = field(default=None)
    _plans: list[Plan] = field(default_factory=list)
    _steps: _Steps = field(default_factory=_Steps)

    def after_step(self, steering: Steering, report: Report) -> None:
        if self.profile is None:
            self._measure(steering, report.step)
            return
        if (step_s := self._steps.median_s(report)) is not None:
            self.tried[self._plans.pop(0).signature] = step_s
            self._next(steering)

    def _measure(self, steering: Steering, step: int) -> None:
        trial = self.trials[step] if step < len(self.trials) else None
        last, self._last = self._last, trial
        if last is not None and (trial is None or trial.num_devices != last.num_devices):
            self.num_rows, self.fewest = self.num_rows + 1, last.num_devices
            time.sleep(SETTLE_S)
            steering.record()
        if trial is None:
            self.profile = profile_of(steering.run, self.config, self.devices)
            if not self.config.loop.max_lag:
                problem = problem_of(self.config, self.provenance, self.profile, self.devices)
                self._plans = finalists(problem, least=1 if self.tries_one else 2)
            self._next(steering)
            return
        steering.resize(trial.num_prompts)
        if last is not None and (trial.num_devices, trial.chunk) != (last.num_devices, last.chunk):
            staying = self.config.cluster.colocate
            self._switch(steering, self.placement(trial.num_devices), {"granularity": trial.chunk}, staying)

    def _next(self, steering: Steering) -> None:
        if not self._plans:
            raise _Enough
        self._steps = _Steps()
        steering.resize(self.config.loop.prompts_per_step)
        plan = self._plans[0]
        self._switch(steering, placement_of(plan), {"edges": edges_of(plan)}, plan.staying)

    def _switch(
        self,
        steering: Steering,
        placement: dict[str, str],
        cut: dict[str, Any],
        staying: bool | tuple[str, ...],
    ) -> None:
        flow = self.config.flow.model_copy(update={"granularity": 0, "edges": {}, **cut})
        try:
            seconds = steering.switch(placement, flow, staying, keeps_state=False)
        except RunError as error:
            log.warning("nothing is measured on %s: %s", placement, str(error)[:200])
            raise _Enough from error
        self.switch_s = max(self.switch_s, seconds)

    def placement(self, num_devices: int) -> dict[str, str]:
        """Everybody on so many devices, as far as they divide, but those that the recipe places itself; in the last row
        on one replica."""
        num_replicas = {each: num_devices // each for each in devices_each(self.config).values()}
        if num_devices == self.trials[-1].num_devices < len(self.devices):
            num_replicas = dict.fromkeys(num_replicas, 1)
        return {
            name: pinned_placement(self.config, self.provenance, name)
            or seats_text(name, ids_text(range(each * num_replicas[each])), each)
            for name, each in devices_each(self.config).items()
        }


def _short(config: Recipe, placement: Mapping[str, str], num_steps: int, **also: dict[str, Any]) -> Recipe:
    """The recipe for a few steps: synchronous, without what comes before, beside and after them; `also`: changes of
    these changes, by table."""
    changes: dict[str, Any] = {
        "loop": {"steps": num_steps, "max_lag": 0, "overprovision": 0.0, "checkpoint_every": 0},
        "elastic": {"schedule": {}, "prompts_per_engine": 0},
        "eval": {"every": 0, "num_prompts": 0, "sets": ()},
        config.warm_up_table: {"steps": 0},
        "flow": {"granularity": 0, "edges": {}},
        "placement": dict(placement),
        "cluster": {},
        "algorithm": config.keeping_all,
    }
    tables = {
        name: getattr(config, name).model_copy(update=change | also.get(name, {}))
        for name, change in changes.items()
    }
    return config.model_copy(update={**tables, "sinks": ()})


def _row(config: Recipe, devices: Sequence[Device], num_rounds: int) -> list[str]:
    trials = _trials(config, len(devices), num_rounds)
    counts = dict.fromkeys(trial.num_devices for trial in trials)
    return [
        f"{sum(t.num_devices == count for t in trials)} short steps on {count} device{'s' if count > 1 else ''}"
        for count in counts
    ]
