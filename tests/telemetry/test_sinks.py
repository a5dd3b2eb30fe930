from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from rill.errors import MissingExtraError
from rill.telemetry.metrics import MetricLog
from rill.telemetry.sinks.base import SINKS, RunInfo, build_sinks


def info(tmp_path: Path) -> RunInfo:
    return RunInfo(name="demo", directory=tmp_path, config={"steps": 1})


@pytest.mark.parametrize("name", sorted(SINKS))
def test_a_missing_library_gives_the_install_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = SINKS.load(name)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with pytest.raises(MissingExtraError, match=r'pip install "rill\[trackers\]"'):
        build_sinks([sink.Config()], info(tmp_path))


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    sink = SINKS.load("tensorboard")
    with MetricLog(tmp_path, build_sinks([sink.Config()], info(tmp_path))) as log:
        log.write(1, {"reward": 0.5})
        log.write(2, {"reward": 0.75})

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [(point.step, point.value) for point in accumulator.Scalars("reward")] == [(1, 0.5), (2, 0.75)]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
@pytest.mark.slow
def test_wandb_takes_figures_offline(tmp_path: Path) -> None:
    sink = SINKS.load("wandb")
    with MetricLog(tmp_path, build_sinks([sink.Config(mode="offline")], info(tmp_path))) as log:
        log.write(1, {"reward": 0.5})
    assert list((tmp_path / "wandb").glob("offline-run-*"))


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
@pytest.mark.slow
def test_trackio_takes_figures_locally(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    sink = SINKS.load("trackio")
    with MetricLog(tmp_path, build_sinks([sink.Config()], info(tmp_path))) as log:
        log.write(1, {"reward": 0.5})
    assert list((tmp_path / "trackio").glob("*.db"))
