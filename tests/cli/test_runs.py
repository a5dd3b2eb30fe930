from __future__ import annotations

import json
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from rill.cli.main import app
from rill.dashboard.catalog import Catalog
from rill.dashboard.server import make_app
from rill.telemetry import trace
from rill.telemetry.evaluations import Answer, next_path, save
from rill.telemetry.jsonl import LineFile, encode_line
from rill.telemetry.metrics import MetricLog
from rill.telemetry.run import Run
from tests.dashboard.folders import append, group, sample, small_run


@pytest.fixture(autouse=True)
def _workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def finished_run(name: str = "demo") -> Run:
    with Run.create(name, argv=["rill", "train", name]).running() as run, MetricLog(run.path) as log:
        trace.configure(run.path, "driver")
        with trace.span("step"):
            log.write(1, {"reward/mean": 0.25, "loss": 1.0})
        log.write(2, {"reward/mean": 0.75, "loss": 0.5})
        log.write(3, {"eval/accuracy": 0.9})
        trace.shutdown()
    return run


def run(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == exit_code, result.output
    return result.output


def test_no_runs_is_said_in_words() -> None:
    assert run("runs").startswith("no runs in runs/")


def test_runs_are_listed_with_status_steps_and_last_reward() -> None:
    finished_run()
    header, row = run("runs").splitlines()
    assert header.split() == ["run", "status", "steps", "reward", "held-out", "started", "lasted"]
    assert row.split()[:5] == ["demo", "finished", "3", "0.750", "90.0%"]
    (listed,) = json.loads(run("runs", "--json"))
    assert (listed["steps"], listed["reward"]) == (3, 0.75)


def test_a_run_without_figures_is_listed_too() -> None:
    Run.create("young").close()
    assert run("runs").splitlines()[1].split()[:4] == ["young", "interrupted", "0", "-"]


def test_a_run_that_ended_in_its_warm_up_has_taken_no_step() -> None:
    with Run.create("warm").running() as warm, MetricLog(warm.path) as log:
        log.write(-33, {"warmup/loss": 1.0})
    assert run("runs").splitlines()[1].split()[:3] == ["warm", "finished", "0"]


def test_a_copied_run_folder_is_shown_by_its_path(tmp_path: Path) -> None:
    finished_run().path.rename(tmp_path / "elsewhere")
    assert "finished" in run("runs", "show", str(tmp_path / "elsewhere"))


def test_records_of_another_shape_cost_themselves_only(tmp_path: Path) -> None:
    """Every command that reads a run, and the page, over lines and files that another version, or damage, has left."""
    small = small_run(tmp_path / "runs")
    whole = group(3, "g3", sample("6", 1.0))
    strange: dict[str, list[object]] = {
        "metrics.jsonl": [
            {"step": {}, "time_s": 1.0, "values": {}}, {"step": "x", "time_s": 1.0, "values": {}},
            {"step": 4, "time_s": 1.0, "values": {"a": [1]}}, {"step": 4, "time_s": 1.0, "values": {"a": "many"}},
            {"rewind": "all"}, [], 3,
        ],
        "trace/driver.jsonl": [{"kind": "process", "at_ns": 0}, {"kind": "span", "name": "x", "at_ns": "soon"}],
        "rollouts/rollout-0.jsonl": [
            {**whole, "group": None}, {**whole, "samples": [True]}, {**whole, "version": 10**20},
            {**whole, "samples": [{"reward": 1.0, "tokens": 3}]}, whole,
        ],
    }  # fmt: skip
    for name, records in strange.items():
        append(small.path / name, *records)
    small.environment_path.write_text('[3, {"command": [{}], "versions": [], "host": 1}]')
    saved = json.loads(small.status_path.read_text())
    for status in (saved, saved | {"created_s": "then"}, saved | {"changed_s": None}, []):
        small.status_path.write_text(json.dumps(status))
        assert "small" in run("runs") and "reward" in run("runs", "show", "small")
        assert "\u25b86" in run("runs", "rollouts", "small")
        assert "events" in run("runs", "trace", "small")
        assert "report.html" in run("report", "small")
        assert "Lower max_lag" in run("doctor", "small")
        page = TestClient(make_app(Catalog([], tmp_path / "runs")), base_url="http://localhost")
        assert page.get("/api/run/small/rollouts").json()["total"] == 3
        assert page.get("/api/run/small/metrics").json()["steps"] == [1, 2, 3]


def test_show_tells_how_a_run_stands_and_how_to_go_on() -> None:
    finished_run()
    text = run("runs", "show", "demo")
    assert "rill train demo" in text
    assert "eval/accuracy" in text
    assert "reward           0.250 → 0.750   ▁█" in text
    assert "resume with" not in text
    young = Run.create("young")
    young.close()
    assert "resume with" not in run("runs", "show", "young")
    (young.checkpoints_dir / "step-000020").mkdir()
    assert "resume with: rill train --resume runs/young" in run("runs", "show", "young")
    (young.checkpoints_dir / "step-000020").rmdir()
    with MetricLog(young.path) as log:
        log.write(1, {"reward/mean": 0.5})
    assert "resume with: rill train --resume runs/young" in run("runs", "show", "young"), (
        "its tokens are kept"
    )


def test_a_trace_is_exported_for_perfetto(tmp_path: Path) -> None:
    finished_run()
    assert "1 events" in run("runs", "trace", "demo", "-o", "out.json")
    names = [event["name"] for event in json.loads((tmp_path / "out.json").read_text())["traceEvents"]]
    assert "step" in names


def test_rollouts_are_printed_by_step_and_failures_with_their_reason() -> None:
    folder = finished_run().rollouts_dir
    log = LineFile(folder / "rollout-0.jsonl")
    for version, error in ((1, "KeyError: 'x'"), (2, None)):
        sample = {
            "tokens": ["2+2=", "4"],
            "sampled": [0, 1],
            "reward": 1.0 - (error is not None),
            "error": error,
        }
        log.write(
            encode_line({"version": version, "group": f"g{version}", "answer": "4", "samples": [sample]})
        )
    log.close()
    assert run("runs", "rollouts", "demo").splitlines() == [
        "g2, after step 1, expected '4'",
        "    1.00  2+2=▸4",
    ]
    assert "g1, after step 0" in run("runs", "rollouts", "demo", "--step", "0")
    failed = run("runs", "rollouts", "demo", "--failed")
    assert "KeyError: 'x'" in failed and "g2" not in failed
    missing = run("runs", "rollouts", "demo", "--step", "9")
    assert "no recorded rollout after step 9" in missing and "after steps 0 to 1" in missing


def test_a_damaged_run_is_shown_as_far_as_it_goes_and_does_not_hide_the_others() -> None:
    finished_run("sound")
    damaged = finished_run("damaged")
    damaged.status_path.write_text('{"stat')
    damaged.environment_path.unlink()
    with damaged.metrics_path.open("a") as file:
        file.write('{"step": 4}\n{"step": 5, "va')
    listed = {line.split()[0]: line.split()[1:3] for line in run("runs").splitlines()[1:]}
    assert listed == {"sound": ["finished", "3"], "damaged": ["unknown", "3"]}
    text = run("runs", "show", "damaged")
    assert "status.json cannot be read" in text and "how it was started is lost" in text
    assert "0.250 → 0.750" in text


def evaluated(name: str, *rewards: float) -> None:
    answers = [
        Answer(set="gsm8k", prompt_id=f"p{i}", prompt="?", expected="1", response="1", reward=reward)
        for i, reward in enumerate(rewards)
    ]
    save(next_path(Run.open(name)), model=name, metrics={}, config={}, answers=answers)


def test_two_runs_are_compared_prompt_by_prompt() -> None:
    finished_run("old")
    finished_run("new")
    assert "old has no evaluation yet: rill eval old; new has" in run("runs", "compare", "old", "new")
    evaluated("old", *[0.0] * 8)
    evaluated("new", *[0.0] * 8)
    evaluated("new", *[1.0] * 8)  # the newest counts
    text = run("runs", "compare", "old", "new")
    assert text.splitlines()[1].split()[0] == "old"
    assert "gsm8k  8        0.0%   100.0%  +100.0%" in text
    assert "8 / 0           0.0078" in text
    by_file = run("runs", "compare", "runs/old/evaluations/0001.jsonl", "runs/new/evaluations/0001.jsonl")
    assert "+0.0%" in by_file
    compared = json.loads(run("runs", "compare", "old", "new", "--json"))
    assert compared["sets"]["gsm8k"]["num_gained"] == 8
    Path("other.jsonl").write_text("{}\n")
    assert "no evaluation that `rill eval` has written" in run(
        "runs", "compare", "other.jsonl", "new", exit_code=2
    )


def test_a_run_is_deleted_once_it_is_confirmed_and_never_while_it_runs() -> None:
    finished_run("old")
    result = CliRunner().invoke(app, ["runs", "rm", "old"], input="n\n")
    assert result.exit_code == 1 and Path("runs/old").exists()
    assert "deleted runs/old" in run("runs", "rm", "old", "--yes")
    assert not Path("runs/old").exists()
    going_on = Run.create("young")
    assert "is running" in run("runs", "rm", "young", "--yes", exit_code=2)
    going_on.close()


def test_a_run_that_cannot_be_deleted_is_not_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    finished_run("old")
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    assert "could not be deleted" in run("runs", "rm", "old", "--yes", exit_code=2)


def test_a_file_to_write_is_looked_at_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    finished_run("done")
    Path("folder").mkdir()
    Path("file").touch()
    told = {"folder": "folder is a folder: name a file in it", "file/page": "file: File exists"}
    commands = [
        ("report", "done", "-o"),
        ("report", "done", "--svg"),
        ("runs", "trace", "done", "-o"),
        ("eval", "done", "-o"),
        ("plan", "done", "-o"),
        ("plan", "done", "--save-profile"),
        ("simulate", "done", "--svg"),
    ]
    for command in commands:
        for place, said in told.items():
            assert said in run(*command, place, exit_code=2)
    assert sorted(path.name for path in Path().iterdir()) == ["file", "folder", "runs"]
    run("report", "done", "-o", "new/page.html")
    assert Path("new/page.html").exists()
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "page.html cannot be written" in run("report", "done", "-o", "page.html", exit_code=2)
