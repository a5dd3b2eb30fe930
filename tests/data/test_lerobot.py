"""Data sets written as lerobot writes them, in both of its layouts, and read back."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rill.algorithms.embodied import EmbodiedAlgorithmConfig
from rill.data.lerobot import LeRobotData
from rill.envs.robots.recording import shown_of
from rill.errors import ConfigError, DataError
from rill.policies import open_policy
from rill.policies.tokens import TokenPolicy
from rill.training.robots import Demonstration, RobotTrainer
from rill.types import RobotSpec

pyarrow = pytest.importorskip("pyarrow")
SPEC = RobotSpec(state_size=2, action_size=1, cameras=("front",), image_size=8)
BLIND = RobotSpec(state_size=2, action_size=1)
LENGTHS = (5, 3, 4)


def png(value: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(file, "PNG")
    return file.getvalue()


def frames(episode: int, first: int) -> dict[str, list[Any]]:
    length = LENGTHS[episode]
    sign = -1.0 if episode % 2 else 1.0
    return {
        "observation.state": [[sign, 0.1 * t] for t in range(length)],
        "action": [0.5 * sign] * length,  # a feature of one number is written as a number
        "observation.images.front": [{"bytes": png(10 * episode + t), "path": None} for t in range(length)],
        "timestamp": [t / 10 for t in range(length)],
        "frame_index": list(range(length)),
        "episode_index": [episode] * length,
        "index": list(range(first, first + length)),
        "task_index": [episode % 2] * length,
    }


def written(folder: Path, version: str, **changes: Any) -> Path:
    import pyarrow.parquet as parquet

    tables, first = [], 0
    for episode in range(3):
        tables.append(pyarrow.table(frames(episode, first)))
        first += LENGTHS[episode]
    (folder / "meta").mkdir(parents=True)
    chunk = folder / "data" / "chunk-000"
    chunk.mkdir(parents=True)
    tasks = ["go right", "go left"]
    if version == "v2.1":
        for episode, table in enumerate(tables):
            parquet.write_table(table, chunk / f"episode_{episode:06d}.parquet")
        lines = [json.dumps({"task_index": n, "task": task}) for n, task in enumerate(tasks)]
        (folder / "meta" / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    else:
        parquet.write_table(pyarrow.concat_tables(tables[:2]), chunk / "file-000.parquet")
        parquet.write_table(tables[2], chunk / "file-001.parquet")
        table = pyarrow.table({"task_index": [0, 1], "__index_level_0__": tasks})
        parquet.write_table(table, folder / "meta" / "tasks.parquet")
    features = {
        "observation.state": {"dtype": "float32", "shape": [2], "names": None},
        "action": {"dtype": "float32", "shape": [1], "names": None},
        "observation.images.front": {"dtype": "image", "shape": [8, 8, 3], "names": None},
    } | changes
    info = {"codebase_version": version, "fps": 10, "total_episodes": 3, "features": features}
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    return folder


@pytest.fixture(params=["v2.1", "v3.0"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return written(tmp_path / "data set", request.param)


def test_both_layouts_come_back_as_they_were_recorded(folder: Path) -> None:
    episodes = LeRobotData(folder, SPEC).episodes(10)
    assert tuple(len(seen) for seen, _ in episodes) == LENGTHS
    seen, done = episodes[1]
    assert [o.instruction for o in seen] == ["go left"] * 3
    assert np.allclose([o.state for o in seen], [[-1, 0], [-1, 0.1], [-1, 0.2]])
    assert [int(o.images["front"].mean()) for o in seen] == [10, 11, 12]
    assert np.array_equal(done, np.full((3, 1), -0.5, np.float32))
    assert len(LeRobotData(folder, SPEC).episodes(2)) == 2


def test_a_policy_that_imitates_them_does_as_they_did(folder: Path) -> None:
    policy = open_policy(TokenPolicy.Config(chunk=2, bins=9, width=32, depth=1), BLIND, seed=0)
    shown = shown_of(LeRobotData(folder, BLIND).episodes(10), 2)
    inputs, mask = policy.seen(shown.observations), torch.from_numpy(shown.mask_BJ)
    demonstration = Demonstration(
        inputs=inputs, actions_BJA=torch.from_numpy(shown.actions_BJA), mask_BJ=mask
    )
    policy.set_normaliser(inputs.states_BS, demonstration.actions_BJA[mask])
    trainer = RobotTrainer(RobotTrainer.Config(), EmbodiedAlgorithmConfig(), policy)
    first, last = (trainer.imitate(demonstration, count, 16, 1e-2)["bc/loss"] for count in (1, 60))
    assert last < first - 0.5
    acted = policy.act(shown.observations, [0] * 12, greedy=True).actions_BJA[:, 0]
    assert np.abs(acted - shown.actions_BJA[:, 0]).max() < 0.3


def test_actions_in_other_units_are_scaled_by_the_range_that_is_given(folder: Path) -> None:
    (_, done), *_ = LeRobotData(folder, BLIND, action_range=((-1.0,), (3.0,))).episodes(1)
    assert np.allclose(done, -0.25)
    with pytest.raises(ConfigError, match=r"actions up to [46], .* set imitation.action_range"):
        LeRobotData(folder, BLIND, action_range=((0.0,), (0.2,))).episodes(1)
    with pytest.raises(ConfigError, match="has not 1 numbers on each side"):
        LeRobotData(folder, BLIND, action_range=((0.0, 0.0), (1.0, 1.0)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"action": {"dtype": "float32", "shape": [7]}}, r"another robot's: its action has the shape \[7\]"),
        (
            {"observation.images.front": {"dtype": "video", "shape": [8, 8, 3]}},
            "keeps 'observation.images.front' as video files",
        ),
        (
            {
                "observation.images.front": {"dtype": "float32", "shape": [1]},
                "observation.image": {"dtype": "image", "shape": [8, 8, 3]},
            },
            "set imitation.cameras.front to one of observation.image",
        ),
    ],
)
def test_what_does_not_fit_the_robot_is_told_when_it_is_opened(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises((DataError, ConfigError), match=said):
        LeRobotData(written(tmp_path / "set", "v3.0", **changes), SPEC)


def test_a_folder_of_something_else_and_another_version_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no LeRobot data set: meta/info.json"):
        LeRobotData(tmp_path, SPEC)
    with pytest.raises(DataError, match="format v1.6"):
        LeRobotData(written(tmp_path / "old", "v1.6"), SPEC)


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("action", None, "action in .*, row 2: not 1 finite numbers: None"),
        ("action", float("nan"), "action in .*, row 2: not 1 finite numbers"),
        ("observation.state", [1.0], "observation.state in .*, row 2: not 2 finite numbers"),
        ("observation.state", None, "observation.state in .*, row 2: not 2 finite numbers"),
        (
            "observation.images.front",
            {"bytes": b"no picture", "path": None},
            "row 2: its picture or its task",
        ),
        ("observation.images.front", None, "row 2: its picture or its task"),
        ("task_index", 7, "row 2: its picture or its task cannot be read: KeyError"),
    ],
)
def test_a_bad_frame_is_named_by_file_and_row(tmp_path: Path, column: str, value: Any, says: str) -> None:
    import pyarrow.parquet as parquet

    folder = written(tmp_path / "data set", "v2.1")
    broken = frames(1, LENGTHS[0])
    broken[column][1] = value
    parquet.write_table(pyarrow.table(broken), folder / "data" / "chunk-000" / "episode_000001.parquet")
    with pytest.raises(DataError, match=says) as caught:
        LeRobotData(folder, SPEC).episodes(10)
    assert "episode_000001.parquet" in str(caught.value)


@pytest.mark.parametrize("line", ['{"task_index": 1}', "go left", "[1]"])
def test_a_bad_task_is_named_by_file_and_line(tmp_path: Path, line: str) -> None:
    folder = written(tmp_path / "data set", "v2.1")
    (folder / "meta" / "tasks.jsonl").write_text('{"task_index": 0, "task": "go right"}\n' + line)
    with pytest.raises(DataError, match=r"tasks\.jsonl, line 2: no task with its number"):
        LeRobotData(folder, SPEC).episodes(10)


def test_a_column_that_is_missing_and_a_range_without_room_say_so(folder: Path) -> None:
    with pytest.raises(ConfigError, match="must lie below the highest"):
        LeRobotData(folder, BLIND, action_range=((0.5,), (0.5,)))
    for file in (folder / "data" / "chunk-000").iterdir():
        import pyarrow.parquet as parquet

        parquet.write_table(parquet.read_table(file).drop(["action"]), file)
    with pytest.raises(DataError, match="has no column action"):
        LeRobotData(folder, SPEC).episodes(10)
