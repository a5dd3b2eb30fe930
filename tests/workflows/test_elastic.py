"""What a terminal asks of a run, and what the driver makes of it, without a run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rill.cli.main import app
from rill.errors import PlanError, RunError, UserError
from rill.telemetry.run import Run, RunStatus
from rill.workflows.elastic import FOLDER, Door, ask


def join(devices: str) -> str:
    if devices == "7":
        raise PlanError("there is no device 7\nmore")
    return f"joined {devices or 'somewhere'}"


@contextmanager
def attended(run: Run) -> Iterator[None]:
    """A driver that looks for requests."""
    door = Door(run.path, berth=lambda devices: devices, changed=lambda: None)
    is_over = threading.Event()

    def attend() -> None:
        while not is_over.wait(0.01):
            door.attend(join, lambda rank: f"left {rank}")

    thread = threading.Thread(target=attend)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_a_request_is_answered_or_refused_and_leaves_no_file(tmp_path: Path) -> None:
    run = Run.create("r", root=tmp_path)

    def rill(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["engine", *words, "--root", str(tmp_path), "--timeout", "30"])
        return result.exit_code, result.output.strip()

    with attended(run):
        assert rill("join", "r") == (0, "joined somewhere")
        assert rill("join", "r", "--devices", "2-3") == (0, "joined 2-3")
        assert rill("leave", "r", "0") == (0, "left 0")
        code, said = rill("join", "r", "--devices", "7")
        assert code == 2 and said.endswith("there is no device 7")
    assert not list((run.path / FOLDER).iterdir())
    run.set_status(RunStatus.FINISHED)
    code, said = rill("join", "r")
    assert code == 2 and "is not running (finished)" in said


def test_a_request_that_is_too_old_or_cannot_be_read_does_nothing(tmp_path: Path) -> None:
    run = Run.create("r", root=tmp_path)
    with pytest.raises(UserError, match=r"no engines that come and go"):
        ask(run, timeout_s=0.3)
    door = Door(run.path, berth=str, changed=lambda: None)
    with pytest.raises(RunError, match=r"has not answered within 0.3 s"):
        ask(run, timeout_s=0.3)
    (run.path / FOLDER / "1.json").write_text(json.dumps({"until_s": time.time() - 1}))
    (run.path / FOLDER / "2.json").write_text("{half")
    door.attend(join, lambda rank: pytest.fail("nobody leaves"))
    assert not list((run.path / FOLDER).iterdir())
