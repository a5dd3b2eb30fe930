"""What a terminal asks of a run, and what the driver makes of it, without a run."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from rill.cli.main import app
from rill.errors import PlanError, RunError, UserError
from rill.planning.elastic import ElasticConfig, Scaler
from rill.telemetry.requests import FOLDER, Request, answer_all, ask, open_requests
from rill.telemetry.run import Run, RunStatus


def join(devices: str) -> str:
    if devices == "7":
        raise PlanError("there is no device 7\nmore")
    return f"joined {devices or 'somewhere'}"


def act(asked: Request) -> str:
    return join(asked.devices) if asked.leaving is None else f"left {asked.leaving}"


@contextmanager
def attended(run: Run) -> Iterator[None]:
    """A driver that looks for requests."""
    open_requests(run.path)
    is_over = threading.Event()

    def attend() -> None:
        while not is_over.wait(0.01):
            answer_all(run.path, act)

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
    open_requests(run.path)
    with pytest.raises(RunError, match=r"has not answered within 0.3 s"):
        ask(run, timeout_s=0.3)
    (run.path / FOLDER / "1.json").write_text(json.dumps({"until_s": time.time() - 1}))
    (run.path / FOLDER / "2.json").write_text("{half")
    answer_all(run.path, lambda asked: pytest.fail("nothing is asked"))
    assert not list((run.path / FOLDER).iterdir())


def test_a_clock_that_is_set_forward_ends_no_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.create("r", root=tmp_path)
    open_requests(run.path)

    def answered(_: float) -> None:
        (path,) = (run.path / FOLDER).glob("*.json")
        path.with_suffix(".answer").write_text(json.dumps({"done": "joined"}))

    hours = itertools.count(0.0, 3600.0)
    clock = SimpleNamespace(
        time=lambda: next(hours), time_ns=time.time_ns, monotonic=time.monotonic, sleep=answered
    )
    monkeypatch.setattr("rill.telemetry.requests.time", clock)
    assert ask(run, timeout_s=600.0) == "joined"


class Fleet:
    """As many engines as join and leave, on so many devices."""

    def __init__(self, num_devices: int) -> None:
        self.ranks, self.num_devices = [0], num_devices

    def join(self, devices: str) -> str:
        if len(self.ranks) == self.num_devices:
            raise PlanError("no device is free")
        self.ranks.append(self.ranks[-1] + 1)
        return "joined"

    def leave(self, rank: int) -> str:
        self.ranks.remove(rank)
        return "left"

    def attended(self, scaler: Scaler, step: int = 0) -> int:
        scaler.scale(step, lambda: tuple(self.ranks), self.join, self.leave)
        return len(self.ranks)


def test_engines_follow_a_schedule_as_far_as_there_are_devices(caplog: pytest.LogCaptureFixture) -> None:
    fleet, config = Fleet(3), ElasticConfig(schedule={2: 3, 5: 1, 6: 4})
    scaler = Scaler(config)
    assert [fleet.attended(scaler, step) for step in (0, 1, 2, 0, 4, 5, 6, 7)] == [1, 1, 3, 3, 3, 1, 3, 3]
    assert caplog.text.count("3 engines, 4 are wanted: no device is free") == 1, (
        "said once, and the run goes on"
    )


def test_an_engine_joins_while_too_many_prompts_wait_and_leaves_when_fewer_would_long_have_done() -> None:
    now = {"s": 0.0, "prompts": 0}
    config = ElasticConfig(prompts_per_engine=4, max_engines=3, idle_s=10)
    scaler = Scaler(config, clock=lambda: now["s"])
    fleet = Fleet(9)
    sizes = []
    for at_s, num_prompts in (
        (0, 4),
        (1, 5),
        (2, 20),
        (3, 20),
        (4, 4),
        (12, 4),
        (15, 4),
        (16, 0),
        (30, 0),
        (31, 9),
    ):
        now.update(s=at_s, prompts=num_prompts)
        scaler.look(lambda: int(now["prompts"]))
        sizes.append(fleet.attended(scaler))
    assert sizes == [1, 2, 3, 3, 3, 3, 2, 2, 1, 3]


def test_a_synchronous_run_goes_by_the_most_prompts_that_it_saw_in_the_step() -> None:
    """Engines come and go between two steps, and each step ends with its slowest prompts."""
    now = {"s": 0.0, "prompts": 0}
    scaler = Scaler(ElasticConfig(prompts_per_engine=4, idle_s=10), clock=lambda: now["s"])
    fleet = Fleet(9)
    sizes = []
    for prompts_of_step in ((12, 9, 1), (12, *[1] * 15), (4, 3, 1), (4, *[1] * 15)):
        for num_prompts in prompts_of_step:
            now.update(s=now["s"] + 1, prompts=num_prompts)
            scaler.look(lambda: int(now["prompts"]))
        sizes.append(fleet.attended(scaler))
    assert sizes == [3, 3, 2, 1], "a long step with many prompts leaves the engines that it needs"
