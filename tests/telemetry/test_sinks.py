from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rill.config import PartConfig
from rill.errors import MissingExtraError
from rill.telemetry.metrics import MetricLog
from rill.telemetry.run import Run
from rill.telemetry.sinks.base import SINKS, Account, RunInfo, build_sinks

ACCOUNT = Account(card=[("Group size?", "8 | 16")], rollouts=[(3, "2+2=", "4 <b>bold</b>\nand on", 1.0)])


def info(tmp_path: Path) -> RunInfo:
    return RunInfo(name="demo", id="demo-1234", directory=tmp_path, config={"steps": 1})


@pytest.mark.parametrize("name", sorted(SINKS))
def test_a_missing_library_gives_the_install_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = SINKS.load(name)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with pytest.raises(MissingExtraError, match=r'pip install "rill\[trackers\]"'):
        build_sinks([sink.Config()], info(tmp_path))


class Away:
    """A tracker that cannot be reached."""

    class Config(PartConfig):
        type: str = f"{__name__}:Away"

    def __init__(self, config: Config, run: RunInfo) -> None:
        raise ConnectionError("no route to the tracker")


def test_a_tracker_that_is_away_when_a_run_begins_does_not_end_it(tmp_path: Path) -> None:
    told: list[str] = []
    assert build_sinks([Away.Config()], info(tmp_path), told.append) == []
    assert len(told) == 1 and "without the sink" in told[0] and "no route to the tracker" in told[0]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    sink = SINKS.load("tensorboard")
    with MetricLog(tmp_path, build_sinks([sink.Config()], info(tmp_path))) as log:
        log.write(-1, {"reward": 0.5})
        log.write(2, {"reward": 0.75})
        log.tell(ACCOUNT)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [(point.step, point.value) for point in accumulator.Scalars("reward")] == [(-1, 0.5), (2, 0.75)]
    assert set(accumulator.Tags()["tensors"]) == {"run card/text_summary", "rollouts/text_summary"}


class FakeTracker:
    """What the sinks use of W&B and Trackio."""

    Table = staticmethod(lambda **content: content)

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.defined: list[tuple[str, str | None]] = []

    def init(self, **settings: Any) -> Any:
        self.started.append(settings)
        return SimpleNamespace(log=self.log, finish=lambda: None, define_metric=self.define)

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        self.logged.append({**values, "step": values.get("step", step)})

    def define(self, name: str, step_metric: str | None = None) -> None:
        self.defined.append((name, step_metric))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_every_tracker_gets_the_same_names_and_the_runs_account(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = FakeTracker()
    monkeypatch.setitem(sys.modules, name, tracker)
    with MetricLog(tmp_path, build_sinks([SINKS.load(name).Config()], info(tmp_path))) as log:
        log.write(-2, {"warmup/loss": 0.5})
        log.write(1, {"reward/mean": 0.25})
        log.tell(ACCOUNT)
    figures, account = tracker.logged[:2], tracker.logged[2]
    assert figures == [{"warmup/loss": 0.5, "step": -2}, {"reward/mean": 0.25, "step": 1}]
    assert {"run card", "rollouts"} <= set(account)
    if name == "wandb":
        assert ("*", "step") in tracker.defined, "its own step takes no negative numbers"


@pytest.mark.parametrize(("name", "field"), [("wandb", "id"), ("trackio", "name")])
def test_a_second_run_of_one_name_is_a_second_run_and_a_resumed_one_is_not(
    name: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = FakeTracker()
    monkeypatch.setitem(sys.modules, name, tracker)

    def start(run: Run) -> None:
        told = RunInfo(name=run.name, id=run.id, directory=run.path)
        build_sinks([SINKS.load(name).Config()], told)
        run.close()

    start(Run.create("demo", root=tmp_path / "a"))
    time.sleep(0.01)
    start(Run.create("demo", root=tmp_path / "b"))
    start(Run.resume("demo", root=tmp_path / "a"))
    first, second, resumed = (settings[field] for settings in tracker.started)
    assert first == resumed != second


def test_a_sink_that_fails_at_the_end_is_dropped(tmp_path: Path) -> None:
    class Broken:
        def write(self, step: int, values: Mapping[str, float]) -> None: ...

        def tell(self, account: Account) -> None:
            raise RuntimeError("no network")

        def close(self) -> None:
            raise AssertionError("it was dropped")

    with MetricLog(tmp_path, [Broken()]) as log:
        log.tell(ACCOUNT)


def test_text_in_a_table_is_no_markup() -> None:
    assert ACCOUNT.card_markdown().splitlines()[-1] == "| Group size? | 8 &#124; 16 |"
    assert ACCOUNT.rollouts_markdown().splitlines()[-1] == "| 3 | 2+2= | 4 &lt;b>bold&lt;/b> and on | 1 |"


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
@pytest.mark.slow
def test_wandb_takes_figures_offline(tmp_path: Path) -> None:
    sink = SINKS.load("wandb")
    with MetricLog(tmp_path, build_sinks([sink.Config(mode="offline")], info(tmp_path))) as log:
        log.write(1, {"reward": 0.5})
        log.tell(ACCOUNT)
    assert list((tmp_path / "wandb").glob("offline-run-*"))
