from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.run_folder import make_run_folder
from rill.dashboard import indexer, rollouts
from rill.dashboard.rollouts import Query, Rollouts
from rill.errors import UserError
from rill.telemetry.run import Run
from tests.dashboard.folders import append, group, sample, small_run


def rollouts_of(run: Run) -> Rollouts:
    indexer.bring_up_to_date(run.path)
    return indexer.rollouts(run.path)


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("runs") / "big"
    return make_run_folder(path, steps=40, rollouts=4000, spans=100)


def lines(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(run.rollouts_dir.glob("*.jsonl")) for line in path.open()]


FILTERS = [
    (Query(from_step=5, to_step=7), lambda g: 5 <= g["version"] - 1 <= 7),
    (Query(task="words"), lambda g: g["task"] == "words"),
    (Query(task="absent"), lambda g: False),
    (Query(prompt="sum/77"), lambda g: g["prompt_id"] == "sum/77"),
    (Query(stop="length"), lambda g: any(s["stop"] == "length" for s in g["samples"])),
    (Query(min_reward=0.5), lambda g: any(s["reward"] >= 0.5 for s in g["samples"])),
    (
        Query(max_reward=0.5, stop="length"),
        lambda g: any(s["reward"] <= 0.5 and s["stop"] == "length" for s in g["samples"]),
    ),
    (Query(only="failed"), lambda g: any(s["error"] for s in g["samples"])),
    (Query(only="dropped"), lambda g: bool(g["dropped"])),
]


@pytest.mark.parametrize(("query", "fits"), FILTERS, ids=[f"filter {n}" for n in range(len(FILTERS))])
def test_a_filter_finds_what_a_look_at_every_line_finds(big: Run, query: Query, fits: Any) -> None:
    assert rollouts_of(big).find(query)["total"] == sum(1 for one in lines(big) if fits(one))


def test_a_search_looks_through_all_text_in_parts_of_bounded_time(
    big: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "SEARCH_BYTES", 10_000)
    monkeypatch.setattr(rollouts, "SEARCH_HITS", 5)
    found, searched = rollouts_of(big), 0
    places = set()
    for _ in range(1000):
        answer = found.find(Query(text="CARRY one", searched=searched, count=500))
        places |= {(row["log"], row["place"]) for row in answer["groups"]}
        searched = answer["searched"]
        if searched >= answer["text_bytes"]:
            break
    wanted = sum(1 for g in lines(big) if any("carry one" in "".join(s["tokens"]) for s in g["samples"]))
    assert len(places) == wanted > 0


def test_a_search_finds_words_that_lie_across_two_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "SEARCH_BYTES", 7)
    found = rollouts_of(small_run(tmp_path))
    assert found.find(Query(text="document.title"))["total"] == 1
    assert found.find(Query(text="2+2=4"))["total"] == 0, "prompt and answer are separate texts"
    assert found.find(Query(text="absent"))["total"] == 0


def test_orders(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    append(run.path / "rollouts" / "rollout-1.jsonl", group(2, "g3", sample("444", 1.0), sample("4", 1.0)))
    found = rollouts_of(run)
    steps = {
        order: [row["step"] for row in found.find(Query(order=order))["groups"]] for order in rollouts.ORDERS
    }
    assert steps["newest"] == [2, 1, 0]
    assert steps["oldest"] == [0, 1, 2]
    assert steps["best"][0] == 1
    assert steps["spread"][0] == 0
    with pytest.raises(UserError, match="newest, oldest"):
        found.find(Query(order="random"))


def test_rows_say_what_the_list_shows(tmp_path: Path) -> None:
    newest, oldest = rollouts_of(small_run(tmp_path)).find(Query())["groups"]
    assert (oldest["rewards"], oldest["stops"], oldest["preview"]) == ([1.0, 0.0], ["eos", "length"], "2+2=")
    assert (newest["reward"], newest["num_failed"], newest["is_dropped"]) == (None, 1, True)
    assert oldest["num_sampled"][0] == 1, "the prompt's tokens are not the answer's"


def test_a_prompt_is_followed_over_training(big: Run) -> None:
    steps = [row["step"] for row in rollouts_of(big).prompt("sum/77")]
    assert steps == sorted(g["version"] - 1 for g in lines(big) if g["prompt_id"] == "sum/77")


def test_facets_say_what_can_be_chosen(tmp_path: Path) -> None:
    facets = rollouts_of(small_run(tmp_path)).facets()
    assert facets["steps"] == [[0, 1, 0.5], [2, 1, 0.0]]
    assert (facets["tasks"], facets["stops"], facets["tags"]) == (["sums"], ["eos", "length"], ["odd"])


def test_answers_of_an_evaluation_are_a_data_set_of_their_own_and_no_bar_of_training(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    append(run.path / "rollouts" / "rollout-0.jsonl", group(9, "h", sample("4", 1.0), evaluates="held_out"))
    append(
        run.path / "rollouts" / "eval-0001.jsonl",
        group(9, "e", sample("4", 1.0), evaluates="eval-0001 held_out"),
    )
    found = rollouts_of(run)
    assert found.facets()["tasks"] == ["evaluation: eval-0001 held_out", "evaluation: held_out", "sums"]
    assert found.group(0, 0)["evaluates"] == "eval-0001 held_out"
    assert [step for step, _, _ in found.facets()["steps"]] == [0, 2]
    assert [row["step"] for row in found.find(Query(task="evaluation: held_out"))["groups"]] == [8]


def test_a_tag_chooses_its_groups_only(tmp_path: Path) -> None:
    found = rollouts_of(small_run(tmp_path))
    assert [row["step"] for row in found.find(Query(tag="odd"))["groups"]] == [0]
    assert found.find(Query(tag="absent"))["total"] == 0


def test_a_group_comes_as_its_log_has_it(tmp_path: Path) -> None:
    found = rollouts_of(small_run(tmp_path))
    assert found.group(0, 0)["samples"][0]["tokens"] == ["2", "+2=", "4"]
    for log, place in ((0, 99), (9, 0), (-1, 0), (0, -1)):
        with pytest.raises(UserError, match="no group"):
            found.group(log, place)


def test_what_the_trainer_knows_of_a_sample_comes_with_it(tmp_path: Path) -> None:
    """The newest it wrote: a run that was resumed may have trained on a sample again."""
    run = small_run(tmp_path)
    name = rollouts_of(run).group(0, 0)["samples"][0]["id"]
    for entropy in (0.5, 0.25):
        append(run.path / "trained" / "actor-0.jsonl", {"id": name, "entropies": [None, None, entropy]})
    append(run.path / "trained" / "actor-1.jsonl", {"id": "another", "entropies": [1.0]})
    for one in rollouts_of(run).group(0, 0)["samples"]:
        assert one.get("entropies") == ([None, None, 0.25] if one["id"] == name else None)


def test_a_log_changed_under_its_index_is_told_in_words(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    found = rollouts_of(run)
    (run.rollouts_dir / "rollout-0.jsonl").write_text("x" * 10)
    with pytest.raises(UserError, match="was changed"):
        found.group(0, 0)


def test_damaged_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    with (run.rollouts_dir / "rollout-0.jsonl").open("ab") as file:
        file.write(
            b'{"version": 1}\n\xff\xfe\n{"version": "x", "group": 1, "samples": 3}\n{"version": 9, "gro'
        )
    assert rollouts_of(run).num_groups == 2


def test_no_rollouts_are_no_rollouts() -> None:
    empty = Rollouts([])
    assert empty.find(Query(text="x"))["groups"] == []
    assert empty.facets()["steps"] == []
