"""`rill chaos`: hurt a real run at random moments, from a seed, and check what rill promises of it.

    undisturbed run, where its bits are promised ──────────────────────────────┐
    the run, hurt: kill, stop, slow, disconnect, memory, node, driver, disk ──▶ what held ──▶ printed, RUN/chaos.json

The runs are `rill train` in processes of their own; the harness only sends signals and reads the run folders.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import psutil
import typer

from rill.cli.arguments import RUNS, Root
from rill.cli.config import load_and_resolve
from rill.cli.console import complain, say
from rill.envs.events import BEGUN
from rill.errors import UserError
from rill.journal.reader import LogReader, segments
from rill.journal.records import Event, Segment
from rill.journal.token_log import FOLDER
from rill.telemetry.metrics import METRICS_FILE, read_metrics
from rill.telemetry.run import Run, RunStatus, write_atomically

if TYPE_CHECKING:
    from rill.workflows.rl_config import RLConfig

app = typer.Typer(rich_markup_mode=None, add_completion=False)

CHAOS_FILE = "chaos.json"
KINDS = {"kill": 16, "stop": 8, "slow": 4, "disconnect": 4, "memory": 1, "node": 1, "driver": 1, "disk": 1}
"""With how often each is chosen."""
SMALL_DISK_BYTES = 1 << 30
"""Only a file system of at most this size is filled."""
WHILE_IT_RECOVERS = 0.1
"""How likely a fault is while no step was taken since the last, and there is one at most: else a slow machine would
never come to a step."""
CALM_AFTER = 0.75
"""Of its time a run is hurt no more, so that it can end."""
SPREAD = 0.8
"""Of its steps all faults have come: where there are fewer by then, the next comes sooner."""
SOONER = 0.1
LOOK_S = 0.05
"""How often its steps are looked at."""
SETTINGS = ("loop.max_relaunches=100000", "journal.keep=true")
GOOD = (True, "not promised here")
EXACT = "rollout.engine.batch_invariant=true"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    at_s: float
    """Since the run was started."""
    kind: str
    target: str


@app.command()
def chaos(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or file; a small one.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes, such as loop.steps=20.")] = None,
    faults: Annotated[
        int, typer.Option("--faults", min=0, help="Hurt it so often, if it lasts long enough.")
    ] = 20,
    seed: Annotated[int, typer.Option("--seed", help="Decides what is done to whom, and when.")] = 0,
    every_s: Annotated[
        float, typer.Option("--every", min=0.1, help="Seconds between two faults; fewer where steps are few.")
    ] = 2.0,
    kinds: Annotated[
        str, typer.Option("--kinds", help=f"Of {', '.join(KINDS)}; disk needs a small one.")
    ] = "",
    root: Root = RUNS,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds that each of the two runs may take.")
    ] = 3600.0,
) -> None:
    """Run a recipe while processes are killed, stopped, slowed down and cut off at random, and say what held: it
    finishes, every group is trained on once, every token has its record, no tool ran twice, nothing is left behind
    and, where the run is synchronous, the weights are those of an undisturbed run before it to the last bit.

    Ends with exit code 1 when something did not hold, or nothing was done to it. What was done is in the run folder,
    in chaos.json.

    \b
    Examples:
      rill chaos demo --faults 30
      rill chaos demo loop.steps=200 --faults 300 --seed 7
      rill chaos demo --kinds kill,stop --root /mnt/small-tmpfs
    """
    named = kinds.split(",") if kinds else []
    for kind in named:
        if kind not in KINDS:
            raise UserError(f"kind {kind!r}: there are {', '.join(KINDS)}")
    if "disk" in named and not _is_small(root):
        raise UserError(
            f"kind 'disk' fills one of at most 1 GiB, and {root} is on a larger: name a --root on such"
        )
    chosen = named or [kind for kind in KINDS if kind != "disk" or _is_small(root)]
    changes = [*(overrides or []), *SETTINGS]
    _, config = load_and_resolve(recipe, overrides)
    from rill.workflows.rl_config import RLConfig

    if not isinstance(config, RLConfig):
        raise UserError(
            f"{recipe} keeps no token log, by which a run is checked: choose a recipe of RL on tokens"
        )
    if config.rollout.engine.type == "native":
        changes.append(EXACT)
    calm = None
    if is_exact(config):
        calm = Trained(recipe, changes, root, f"chaos-{seed}-calm")
        say(f"the undisturbed run, which writes to {calm.log}")
        calm.end(timeout_s)
    hurt = Trained(recipe, changes, root, f"chaos-{seed}-hurt")
    say(f"the run, hurt up to {faults} times, which writes to {hurt.log}")
    done = Harness(hurt, random.Random(seed), chosen, every_s, config.loop.steps).run(faults, timeout_s)
    held = what_held(config, calm.run() if calm else None, hurt.run(), hurt)
    report = {"seed": seed, "faults": [asdict(fault) for fault in done], "held": held}
    write_atomically(hurt.run().path / CHAOS_FILE, json.dumps(report, indent=1))
    counts = {kind: sum(fault.kind == kind for fault in done) for kind in chosen}
    say(f"{'faults':<42} {len(done)} ({', '.join(f'{kind} {n}' for kind, n in counts.items())})")
    if faults and not done:
        complain("nothing was done to it: it ended too soon (more loop.steps, a smaller --every)")
    for promise, verdict in held.items():
        color = "green" if verdict in GOOD else "red"
        say(f"{promise:<42} {typer.style('held' if verdict is True else str(verdict), fg=color)}")
    say(f"{'told in':<42} {hurt.run().path / CHAOS_FILE}")
    if any(verdict not in GOOD for verdict in held.values()) or (faults and not done):
        raise typer.Exit(1)


class Trained:
    """`rill train` in a process of its own, as a user would start it."""

    def __init__(self, recipe: str, changes: list[str], root: Path, name: str) -> None:
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        self._root = root
        self._name = name = next(name for name in names if not (root / name).exists())
        self.log = Path(root) / f"{name}.txt"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.everybody: dict[int, psutil.Process] = {}
        """That was ever seen of it."""
        self._start([recipe, *changes, "--name", name, "--root", str(root)])

    def resume(self) -> None:
        self._start(["--resume", str(self.path)])

    def end(self, timeout_s: float) -> None:
        """Wait until the run has ended well. UserError: it has not, and no other would."""
        try:
            if self.process.wait(timeout_s) != 0:
                raise UserError(f"the undisturbed run fails too: {self.said()}")
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(60)
            raise UserError(
                f"the undisturbed run has not ended after {timeout_s:g} s: give more (--timeout), or fewer loop.steps"
            ) from None

    @property
    def path(self) -> Path:
        return self._root / self._name

    def run(self) -> Run:
        return Run.open(self._name, root=self._root)

    def said(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return "\n".join(lines[-15:])

    def workers(self) -> dict[str, psutil.Process]:
        """Those that live, by name: rollout[0], hub …"""
        found: dict[str, psutil.Process] = {}
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    self.everybody[process.pid] = process
                    found[process.name()] = process
        return dict(sorted(found.items()))

    def _start(self, arguments: list[str]) -> None:
        with self.log.open("a") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from rill.cli.main import main; main()", "train", *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )


class Harness:
    """Hurts a run until it ends."""

    def __init__(
        self, hurt: Trained, rng: random.Random, kinds: list[str], every_s: float, num_steps: int
    ) -> None:
        self._hurt = hurt
        self._rng = rng
        self._kinds = kinds
        self._every_s = every_s
        self._num_steps = num_steps
        self._newest_step = 0
        self._size = 0
        self._has_stepped = False
        self._may_strike_again = True

    def run(self, num_faults: int, timeout_s: float) -> list[Fault]:
        started_s = time.monotonic()
        done: list[Fault] = []
        while time.monotonic() - started_s < timeout_s:
            if time.monotonic() - started_s > CALM_AFTER * timeout_s:
                num_faults = len(done)
            code = self._wait(len(done), num_faults)
            if code == 0:
                return done
            if code is None:
                if len(done) < num_faults and self._is_due() and (fault := self._inflict(started_s)):
                    done.append(fault)
                    at = f"{fault.at_s:7.1f} s  step {self._newest_step}/{self._num_steps}"
                    say(f"{at:<26} {fault.kind} {fault.target}")
                continue
            if not done or done[-1].kind != "driver":
                complain(f"the run ended by itself:\n{self._hurt.said()}")
                return done
            self._wait_for_the_dead()
            self._hurt.resume()
        complain(f"the run has not ended after {timeout_s:.0f} s:\n{self._hurt.said()}")
        self._hurt.process.kill()
        return done

    def _wait(self, num_done: int, num_faults: int) -> int | None:
        """Until the next fault may come, or the run's exit code. Its steps are watched: a fast run is hurt in time."""
        left_s = min(self._rng.expovariate(1 / self._every_s), 5 * self._every_s)
        while left_s > 0:
            try:
                return self._hurt.process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                is_late = num_done < num_faults * self._progress() / SPREAD
                left_s -= LOOK_S / SOONER if is_late else LOOK_S
        return None

    def _progress(self) -> float:
        """The share of its steps that were taken."""
        path = self._hurt.path / METRICS_FILE
        size = path.stat().st_size if path.exists() else 0
        before, self._size = self._size, size  # it is cut when a run is resumed
        if size > before:
            self._has_stepped = self._may_strike_again = True
            self._newest_step = max([self._newest_step, *(row.step for row in read_metrics(self._hurt.path))])
        return self._newest_step / self._num_steps

    def _is_due(self) -> bool:
        if self._has_stepped:
            self._has_stepped = False
            return True
        is_due = self._may_strike_again and self._rng.random() < WHILE_IT_RECOVERS
        self._may_strike_again &= not is_due
        return is_due

    def _inflict(self, started_s: float) -> Fault | None:
        """One fault; None where there is nobody to hurt yet."""
        kind = self._rng.choices(self._kinds, [KINDS[kind] for kind in self._kinds])[0]
        workers = self._hurt.workers()
        named = [name for name in workers if "[" in name]
        if not named:
            return None
        target = self._rng.choice(named)
        lasts_s = self._rng.uniform(0.2, 3.0)
        if kind == "driver":
            target = "driver"
            self._hurt.process.kill()
            self._hurt.process.wait()  # so that no other fault comes before it is resumed
        elif kind == "node":
            with contextlib.suppress(psutil.Error):  # with its agent ends all that it has started
                if (agent := workers[target].parent()) is not None:
                    agent.kill()
            target = "agent"
        elif kind == "memory":  # what a kernel does that has none left
            target = max(named, key=lambda name: _resident_bytes(workers[name]))
            _signal(workers[target], signal.SIGKILL)
        elif kind == "disk":
            target = str(self._hurt.path)
            self._fill_disk(lasts_s)
        elif kind == "disconnect":
            target = "hub"  # everybody is cut off at once, until it is back
            if target not in workers:
                return None
            _signal(workers[target], signal.SIGKILL)
        elif kind == "kill":
            _signal(workers[target], signal.SIGKILL)
        else:
            self._hold_up(workers[target], lasts_s, stutters=kind == "slow")
        return Fault(at_s=round(time.monotonic() - started_s, 3), kind=kind, target=target)

    def _hold_up(self, process: psutil.Process, lasts_s: float, *, stutters: bool) -> None:
        end_s = time.monotonic() + lasts_s
        while time.monotonic() < end_s:
            _signal(process, signal.SIGSTOP)
            time.sleep(0.05 if stutters else lasts_s)
            _signal(process, signal.SIGCONT)
            time.sleep(0.02)

    def _fill_disk(self, lasts_s: float) -> None:
        ballast = self._hurt.path / "ballast"
        try:
            with ballast.open("wb") as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 20))
            time.sleep(lasts_s)
        finally:
            ballast.unlink(missing_ok=True)

    def _wait_for_the_dead(self) -> None:
        """Workers end by themselves when their driver is gone."""
        psutil.wait_procs(self._hurt.everybody.values(), timeout=60)


def is_exact(config: RLConfig) -> bool:
    """Whether two runs of it end with the same bits."""
    return config.loop.max_lag == 0 and not config.loop.overprovision


def what_held(config: RLConfig, calm: Run | None, hurt: Run, process: Trained) -> dict[str, Any]:
    """Every promise: True, or what was found instead. `calm`: the undisturbed run, where its bits are promised."""
    loop = config.loop
    left = [p.pid for p in psutil.wait_procs(process.everybody.values(), timeout=30)[1]]
    log = LogReader(hurt.path)
    log.read_all()
    return {
        "it finishes": hurt.state().status is RunStatus.FINISHED or hurt.state().status.value,
        "every group is trained on once": _first(_batches(log, loop.steps, loop.prompts_per_step)),
        "every token trained on has its record": _first(_records(log, config.rollout.group_size)),
        "no tool ran twice": _first(_tools(hurt)),
        "the weights are the same to the last bit": "not promised here"
        if calm is None
        else _weights(hurt) == _weights(calm) or "they differ",
        "nothing is left behind": not left or f"processes {left}",
    }


def _first(problems: Iterator[str]) -> bool | str:
    return next(problems, True)


def _batches(log: LogReader, num_steps: int, size: int) -> Iterator[str]:
    batches = log.batches()
    if sorted(batches) != list(range(num_steps)):
        yield f"{len(batches)} of {num_steps} batches"
    seen: dict[int, int] = {}
    for step, indices in batches.items():
        if len(indices) != size:
            yield f"the batch of step {step} has {len(indices)} groups"
        for index in indices:
            if index in seen:
                yield f"group {index} is in the batches of steps {seen[index]} and {step}"
            seen[index] = step


def _records(log: LogReader, group_size: int) -> Iterator[str]:
    yield from log.damages()
    finished = {name.partition("#")[0] for name, sequence in log.sequences() if sequence.is_finished}
    for indices in log.batches().values():
        for index in indices:
            for number in range(group_size):
                if f"g{index:08d}/{number}" not in finished:
                    yield f"answer g{index:08d}/{number} was trained on and is not in the log"


def _tools(run: Run) -> Iterator[str]:
    results: set[tuple[str, str]] = set()
    for path in segments(run.path / FOLDER):
        for record in Segment(path).read():
            if isinstance(record, Event) and record.key.startswith("tool/") and record.value != BEGUN:
                if (record.of, record.key) in results:
                    yield f"{record.key} of {record.of} has two results"
                results.add((record.of, record.key))


def _weights(run: Run) -> str:
    path = run.path / "model" / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else f"none in {run.path}"


def _signal(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def _resident_bytes(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


def _is_small(root: Path) -> bool:
    root.mkdir(parents=True, exist_ok=True)
    return shutil.disk_usage(root).total <= SMALL_DISK_BYTES
