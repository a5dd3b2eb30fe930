from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rill.dashboard.report import MAX_GROUPS, collect, write_report
from rill.errors import UserError
from rill.telemetry.metrics import MetricLog
from rill.telemetry.run import Run
from tests.dashboard.folders import HOSTILE, append, group, process, sample, small_run, span


def embedded(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="rill-report">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def test_a_report_holds_every_page(tmp_path: Path) -> None:
    data = embedded(write_report(small_run(tmp_path)).read_text(encoding="utf-8"))
    assert data["metrics"]["series"]["reward/mean"]["y"] == [0.1, 0.2, 0.3]
    names = data["timeline"]["names"]
    assert {names[one[1]] for one in data["timeline"]["spans"]} >= {"step", "train", "generate"}
    assert any(one["attributes"] == {"step": 1} for one in data["spans"].values())
    assert [one["group"] for one in data["rollouts"]] == ["g1", "g2"]
    assert ["loop.steps", "3", "recipes/x.toml:4"] in data["config"]["rows"]
    assert data["guards"]["findings"][0]["guard"] == "lag"
    assert data["overview"]["card"]


def test_a_report_is_one_file_that_reaches_for_nothing(tmp_path: Path) -> None:
    page = write_report(small_run(tmp_path)).read_text(encoding="utf-8")
    outside = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", outside.split('id="rill-report"')[0])
    assert "/static/" not in page


def test_markup_in_a_rollout_cannot_leave_the_data_element(tmp_path: Path) -> None:
    page = write_report(small_run(tmp_path)).read_text(encoding="utf-8")
    assert page.count("</script>") == 2, "only the page's own elements end"
    assert "".join(embedded(page)["rollouts"][0]["samples"][1]["tokens"][2:]) == HOSTILE


def test_a_cut_or_damaged_log_still_shows_what_is_there(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    for path in [run.metrics_path, *run.path.glob("trace/*.jsonl"), *run.path.glob("rollouts/*.jsonl")]:
        with path.open("ab") as file:
            file.write(
                b'{"broken": \n{"of": "another version"}\n{"kind": "span", "at_ns": 1}\n[]\n{"step": 9, "val'
            )
    data = collect(run)
    assert data["metrics"]["steps"] == [1, 2, 3]
    assert len(data["rollouts"]) == 2


def test_an_empty_run_folder_is_an_error_in_words(tmp_path: Path) -> None:
    run = Run.create("empty", root=tmp_path)
    run.close()
    with pytest.raises(UserError, match="nothing to report"):
        write_report(run)


def test_of_too_many_groups_those_kept_are_spread_over_the_run(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    many = (group(version, f"g{version}", sample("4", 1.0)) for version in range(1, 3 * MAX_GROUPS))
    append(run.path / "rollouts" / "rollout-1.jsonl", *many)
    data = collect(run)
    steps = [one["step"] for one in data["rollouts"]]
    assert len(steps) == MAX_GROUPS
    assert (steps[0], steps[-1]) == (0, 3 * MAX_GROUPS - 2)
    assert data["num_recorded"] > MAX_GROUPS


def test_of_groups_that_are_too_large_together_those_kept_are_spread_over_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run(tmp_path)
    many = (group(version, f"g{version}", sample("4" * 500, 1.0)) for version in range(1, 101))
    append(run.path / "rollouts" / "rollout-1.jsonl", *many)
    monkeypatch.setattr("rill.dashboard.report.MAX_ROLLOUT_BYTES", 50_000)
    steps = [one["step"] for one in collect(run)["rollouts"]]
    assert 5 < len(steps) < 20 and (steps[0], steps[-1]) == (0, 99)
    assert max(b - a for a, b in zip(steps, steps[1:])) <= 2 * 100 / len(steps)


def test_where_the_time_went_counts_ranks_side_by_side_once(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    with MetricLog(run.path) as log:
        log.write(4, {"time/rollout_wait_s": 0.5, "time/train_s": 2.0})
    for rank, seconds in enumerate((90.0, 80.0)):
        log_file = run.path / "trace" / f"actor[{rank}]#0.jsonl"
        append(log_file, process(f"actor[{rank}]"), span("actor.warm_up", "actor", 0.0, seconds))
    shares = [tuple(part) for part in collect(run)["overview"]["shares"]]
    assert shares == [("warm-up", 90.0), ("training", 8.0), ("waiting for rollouts", 0.5)]


def test_pictures_become_part_of_the_file_while_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run(tmp_path)
    (run.path / "media").mkdir()
    for name, size in (("a.png", 10), ("b.png", 3000)):
        (run.path / "media" / name).write_bytes(b"x" * size)
    media = [{"path": "a.png"}, {"path": "b.png"}, {"path": "../status.json"}, {"path": "absent.png"}]
    append(run.path / "rollouts" / "rollout-1.jsonl", group(9, "g9", sample("4", 1.0, media=media)))
    monkeypatch.setattr("rill.dashboard.report.MAX_MEDIA_BYTES", 1000)
    found = collect(run)["rollouts"][-1]["samples"][0]["media"]
    assert found[0]["data"].startswith("data:image/png;base64,")
    assert all("data" not in one for one in found[1:])
