from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rill.telemetry.jsonl import read_lines
from rill.telemetry.rollout_log import MAX_LOGGED_TOKENS, RolloutLog
from rill.telemetry.rollouts import each_group
from rill.telemetry.run import Run
from rill.types import Group, Picture, Prompt, Sample, Trajectory, Turn


class Letters:
    """A tokenizer: token n is the nth letter."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("a") + token % 26) for token in ids)


def trajectory(group: str, version: int, length: int = 3, **more: Any) -> Trajectory:
    versions = np.full(length, version, np.int32)
    versions[0] = -1
    fields: dict[str, Any] = {
        "token_ids": np.arange(length, dtype=np.int32),
        "logprobs": np.full(length, -0.12345, np.float32),
        "versions": versions,
        "loss_mask": versions >= 0,
        "turn_ids": np.zeros(length, np.int32),
    }
    return Trajectory(id=f"{group}/0", group_id=group, prompt_id="p", reward=0.5, **fields | more)


def record_of(folder: Path, group: Group, **more: Any) -> dict[str, Any]:
    log = RolloutLog(folder, "rollout-0", Letters(), max_groups=1)  # type: ignore[arg-type]
    log.write(group, dropped=None, **more)
    log.close()
    (record,) = read_lines(folder / "rollouts" / "rollout-0.jsonl")
    return record


def test_a_record_has_what_the_viewer_shades_tokens_by(tmp_path: Path) -> None:
    said = trajectory(
        "g", 4, turns=(Turn(index=0, role="user", start=0, end=1),), metadata={"media": [{"path": "a.png"}]}
    )
    prompt = Prompt(id="p", task="sums", answer="4", metadata={"tags": ["hard"]})
    trained = Sample(trajectory=said, advantages=np.ones(3, np.float32), old_logprobs=np.zeros(3, np.float32))
    record = record_of(tmp_path, Group(id="g", prompt=prompt, trajectories=(said,)), trained={"g/0": trained})
    (sample,) = record["samples"]
    assert (record["version"], record["tags"]) == (4, ["hard"])
    assert (sample["tokens"], sample["sampled"], sample["mask"]) == (["a", "b", "c"], [0, 1, 1], [0, 1, 1])
    assert sample["logprobs"] == [-0.123] * 3
    assert (sample["advantages"], sample["trainer_logprobs"]) == ([1.0] * 3, [0.0] * 3)
    assert sample["turns"] == [{"role": "user", "start": 0, "end": 1}]
    assert sample["media"] == [{"path": "a.png"}]


def test_a_picture_lies_in_the_run_folder_once_and_every_sample_names_it(tmp_path: Path) -> None:
    picture = Picture(key="00ff", data=b"\xff\xd8\xff...", rows=1, columns=2, start=1)
    said = [trajectory("g", 1, pictures=(picture,)) for _ in range(2)]
    record = record_of(tmp_path, Group(id="g", prompt=Prompt(id="p"), trajectories=tuple(said)))
    for sample in record["samples"]:
        assert sample["media"] == [{"path": "00ff.jpg", "kind": "image", "caption": "tokens 1 to 3"}]
    assert [path.read_bytes() for path in (tmp_path / "media").iterdir()] == [picture.data]


def test_what_the_trainer_has_not_computed_is_left_out(tmp_path: Path) -> None:
    said = trajectory("g", 1)
    record = record_of(tmp_path, Group(id="g", prompt=Prompt(id="p"), trajectories=(said,)))
    assert not {"advantages", "trainer_logprobs", "media"} & set(record["samples"][0])


def test_a_long_sample_is_cut_and_says_how_long_it_was(tmp_path: Path) -> None:
    said = trajectory("g", 1, length=MAX_LOGGED_TOKENS + 5)
    (sample,) = record_of(tmp_path, Group(id="g", prompt=Prompt(id="p"), trajectories=(said,)))["samples"]
    assert (len(sample["tokens"]), sample["num_tokens"]) == (MAX_LOGGED_TOKENS, MAX_LOGGED_TOKENS + 5)


def test_so_many_groups_of_a_version_are_kept(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, "rollout-0", Letters(), max_groups=2)  # type: ignore[arg-type]
    for version, name in (
        (1, "a"),
        (2, "b"),
        (1, "c"),
        (2, "d"),
        (1, "e"),
        (2, "f"),
    ):  # mixed, as engines end them
        group = Group(id=name, prompt=Prompt(id="p"), trajectories=(trajectory(name, version),))
        log.write(group, dropped=None)
    log.close()
    assert [r["group"] for r in read_lines(tmp_path / "rollouts" / "rollout-0.jsonl")] == ["a", "b", "c", "d"]


def test_answers_to_the_first_prompts_of_an_evaluation_are_kept_every_time(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "run", "rollout-0", Letters(), max_groups=2)  # type: ignore[arg-type]
    for version in (1, 11):
        for place in range(3):
            said = (trajectory(f"held_out/{place}", version),)
            group = Group(id=f"held_out/{place}", prompt=Prompt(id=f"p{place}"), trajectories=said)
            log.write_evaluation(group, place, "held_out")
    log.close()
    records = list(read_lines(tmp_path / "run" / "rollouts" / "rollout-0.jsonl"))
    assert [record["group"] for record in records] == [
        "held_out/0@1", "held_out/1@1", "held_out/0@11", "held_out/1@11",
    ]  # fmt: skip
    assert {record["evaluates"] for record in records} == {"held_out"}
    assert list(each_group(Run(tmp_path / "run"))) == [], "those of training are asked for"
