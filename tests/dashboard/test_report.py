from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from rill.dashboard.report import collect, write_report
from rill.errors import UserError
from rill.telemetry import trace
from rill.telemetry.jsonl import LineFile, encode_line
from rill.telemetry.metrics import MetricLog
from rill.telemetry.run import Run

HOSTILE = "</script><script>document.title='owned'</script><!--"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run.create("r", root=tmp_path, config_toml="seed = 0\n")
    log = MetricLog(run.path)
    for step in range(3):
        log.write(step, {"reward/mean": 0.1 * step, "mismatch/abs_mean": 1.7e-7})
    log.close()
    trace.configure(run.path, "driver")
    with trace.span("step", lane="loop", step=1):
        pass
    trace.shutdown()
    group = {
        "version": 1, "group": "g1", "prompt_id": "p", "task": "t", "answer": "4", "dropped": None,
        "samples": [{
            "id": "g1/0", "reward": 1.0, "parts": {}, "stop": "eos", "error": None, "tokens": ["2+2=", HOSTILE],
            "logprobs": [0.0, -0.5], "sampled": [0, 1], "versions": [-1, 1], "num_tokens": 2,
        }],
    }  # fmt: skip
    LineFile(run.path / "rollouts" / "rollout-0.jsonl").write(encode_line(group))
    run.close()
    return run


def embedded(page: str) -> Any:
    found = re.search(r"const data = (.*);\n", page)
    assert found is not None
    return json.loads(found.group(1))


def test_a_report_holds_curves_timeline_rollouts_and_config(run: Run) -> None:
    data = embedded(write_report(run).read_text(encoding="utf-8"))
    assert data["metrics"]["series"]["reward/mean"] == {"x": [0, 1, 2], "y": [0.0, 0.1, 0.2]}
    assert [span[1] for span in data["timeline"]["spans"]] == ["step"]
    assert data["rollouts"][0]["samples"][0]["reward"] == 1.0
    assert data["config"] == "seed = 0\n"


def test_small_figures_are_not_rounded_to_nothing(run: Run) -> None:
    assert collect(run)["metrics"]["series"]["mismatch/abs_mean"]["y"][0] == 1.7e-7


def test_markup_in_a_rollout_cannot_leave_the_script_element(run: Run) -> None:
    page = write_report(run).read_text(encoding="utf-8")
    assert page.count("</script>") == 1, "only the page's own script element ends"
    assert embedded(page)["rollouts"][0]["samples"][0]["tokens"][1] == HOSTILE


def test_a_cut_or_damaged_log_still_shows_what_is_there(run: Run) -> None:
    for path in [
        run.metrics_path,
        run.path / "guards.jsonl",
        *(run.path / "trace").glob("*.jsonl"),
        *(run.path / "rollouts").glob("*.jsonl"),
    ]:
        with path.open("ab") as file:
            file.write(
                b'{"broken": \n{"of": "another version"}\n{"kind": "span", "at_ns": 1}\n[]\n{"step": 9, "val'
            )
    data = collect(run)
    assert len(data["metrics"]["steps"]) == 3
    assert len(data["rollouts"]) == 1


def test_an_empty_run_folder_is_an_error_in_words(tmp_path: Path) -> None:
    run = Run.create("empty", root=tmp_path)
    run.close()
    with pytest.raises(UserError, match="nothing to report"):
        write_report(run)


def test_a_device_is_one_lane_whoever_holds_it_and_stands_first(run: Run) -> None:
    for process in ("rollout[0]", "actor[0]"):
        trace.configure(run.path, process)
        with trace.span(process, lane="device 0"):
            pass
        trace.shutdown()
    timeline = collect(run)["timeline"]
    assert timeline["lanes"][0] == {"process": "", "lane": "device 0"}
    assert {span[1] for span in timeline["spans"] if span[0] == 0} == {"rollout[0]", "actor[0]"}


def test_the_page_says_where_the_time_went_and_ranks_side_by_side_count_once(run: Run) -> None:
    log = MetricLog(run.path)
    for step in (3, 4):
        log.write(step, {"time/rollout_wait_s": 0.5, "time/train_s": 2.0, "time/sync_s": 0.0})
    log.close()
    for rank, warm_up_s in enumerate((90.0, 80.0)):
        span = {
            "kind": "span", "name": "actor.warm_up", "lane": "actor", "at_ns": 0, "duration_ns": int(warm_up_s * 1e9)
        }  # fmt: skip
        process = {"kind": "process", "process": f"actor[{rank}]", "pid": 1, "host": "h", "at_ns": 0}
        file = LineFile(run.path / "trace" / f"actor[{rank}]#0.jsonl")
        file.write(encode_line(process) + encode_line(span))
    assert collect(run)["shares"] == [("warm-up", 90.0), ("training", 4.0), ("waiting for rollouts", 1.0)]


def test_the_page_counts_rollouts_by_steps_as_the_command_line_does() -> None:
    page = resources.files("rill.dashboard").joinpath("report.html").read_text(encoding="utf-8")
    assert '<label>after step <select id="version">' in page
    assert "v > 0 ? v - 1 :" in page, "version 1 is the policy after 0 steps"
