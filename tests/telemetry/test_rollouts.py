from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

from rill.telemetry.jsonl import LineFile, encode_line
from rill.telemetry.rollouts import (
    SampleRecord,
    each_group,
    in_order,
    latest_error,
    newest_failure,
    then_and_now,
)
from rill.telemetry.run import Run


def sample(answer: str, reward: float, error: str | None = None) -> dict[str, Any]:
    return {"tokens": ["2", "+2=", answer], "sampled": [0, 0, 1], "reward": reward, "error": error}


def recorded(root: Path, **by_file: list[tuple[int, str, list[dict[str, Any]]]]) -> Run:
    run = Run.create("r", root=root)
    for name, groups in by_file.items():
        file = LineFile(run.rollouts_dir / f"{name}.jsonl")
        for version, group, samples in groups:
            file.write(encode_line({"version": version, "group": group, "samples": samples}))
        file.close()
    run.close()
    return run


def test_groups_of_all_engines_come_in_the_order_of_their_versions(tmp_path: Path) -> None:
    run = recorded(
        tmp_path,
        a=[(1, "g0", [sample("4", 1.0)]), (3, "g4", [sample("4", 1.0)])],
        b=[(2, "g2", [sample("5", 0.0)])],
    )
    assert [group.group for group in sorted(each_group(run), key=in_order)] == ["g0", "g2", "g4"]


def test_then_and_now_are_typical_and_neither_the_best_nor_the_worst(tmp_path: Path) -> None:
    first = [sample("1", 0.0), sample("4", 1.0), sample("2", 0.0)]
    last = [sample("4", 1.0), sample("3", 0.0), sample("4", 1.0)]
    lucky, others = [sample("4", 1.0)] * 2, [sample("9", 0.0)] * 3
    then, now = then_and_now(
        recorded(tmp_path, a=[(1, "g0", lucky), (2, "g3", last)], b=[(1, "g1", first), (1, "g2", others)])
    )
    assert (then.prompt, then.reward, now.response, now.reward) == ("2+2=", 0.0, "4", 1.0)
    assert now.line() == "2+2=▸4   reward 1.00"


def test_a_long_run_is_told_of_without_all_of_it_in_memory(tmp_path: Path) -> None:
    words = [f"a{n}" * 1000 for n in range(50)]
    groups = [(n, f"g{n:04d}", [sample(words[n % 50], 1.0, "KeyError: 'x'")]) for n in range(1, 2001)]
    run = recorded(tmp_path, a=groups)
    whole = run.rollouts_dir.joinpath("a.jsonl").stat().st_size
    tracemalloc.start()
    then, now = then_and_now(run)
    errors = latest_error(run), newest_failure(run)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (then.response, now.response, errors) == (words[1], words[2000 % 50], ("KeyError: 'x'",) * 2)
    assert peak < whole / 10


def test_a_run_without_rollouts_has_nothing_to_tell(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    assert then_and_now(run) == [] and latest_error(run) == ""


def test_a_long_answer_loses_its_middle_and_stays_one_line() -> None:
    said = SampleRecord(tokens=["q\n", "a" * 500 + "z"], sampled=[0, 1], reward=0.5)
    assert len(said.line(60)) < 90 and said.line(60).count("…") == 1 and "z   reward 0.50" in said.line(60)
    assert "\n" not in said.line()


def test_the_latest_error_is_found(tmp_path: Path) -> None:
    run = recorded(
        tmp_path, a=[(1, "g0", [sample("4", 0.0, "KeyError: 'x'")]), (2, "g1", [sample("4", 1.0)])]
    )
    assert latest_error(run) == "KeyError: 'x'"
    assert list(each_group(run))[1].samples[0].error is None


def test_why_a_run_has_nothing_to_learn_from_is_found_though_nothing_was_sampled(tmp_path: Path) -> None:
    unsampled, sampled = sample("4", 0.0, "environment: ValueError: bug"), sample("4", 1.0)
    run = recorded(tmp_path, a=[(1, "g0", [sampled]), (-1, "g1", [unsampled, unsampled])])
    assert newest_failure(run) == "environment: ValueError: bug"
    run = recorded(tmp_path / "other", a=[(-1, "g0", [unsampled]), (1, "g1", [sampled, unsampled])])
    assert newest_failure(run) == ""
