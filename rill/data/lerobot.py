"""Data sets in LeRobot's format, v2.1 and v3.0: recorded episodes of a robot, for imitation.

    meta/info.json                    features and their shapes
    meta/tasks.jsonl | tasks.parquet  instructions by number (v2.1 | v3.0)
    data/chunk-000/episode_000000.parquet | file-000.parquet

Both versions are read the same way, row by row, by `episode_index`. What does not fit the robot is told when the data
set is opened, from info.json. Pictures are read where they lie in the parquet files; video files are refused by name.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rill.data.parquet import read_table
from rill.errors import ConfigError, DataError
from rill.models.pillow import pillow
from rill.types import Floats, Observation, Pixels, RobotSpec

STATE, ACTION = "observation.state", "action"
VERSIONS = ("v2.0", "v2.1", "v3.0")


class LeRobotData:
    def __init__(
        self,
        folder: Path,
        spec: RobotSpec,
        *,
        cameras: Mapping[str, str] | None = None,
        action_range: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
    ) -> None:
        """`cameras`: its name of a robot's camera, where that is not observation.images.CAMERA. `action_range`: what
        becomes −1 … 1."""
        self._folder = folder
        self._spec = spec
        try:
            info = json.loads((folder / "meta" / "info.json").read_text(encoding="utf-8"))
            version, features = info["codebase_version"], info["features"]
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{folder} is no LeRobot data set: meta/info.json: {error!r}") from error
        if version not in VERSIONS:
            raise DataError(f"{folder} is of LeRobot's format {version}: {', '.join(VERSIONS)} are read")
        self._cameras = {
            name: (cameras or {}).get(name, f"observation.images.{name}") for name in spec.cameras
        }
        for name, size in ((STATE, spec.state_size), (ACTION, spec.action_size)):
            self._check_size(features, name, size)
        for camera, name in self._cameras.items():
            self._check_camera(features, camera, name)
        if action_range is not None and {len(side) for side in action_range} != {spec.action_size}:
            raise ConfigError(f"imitation.action_range has not {spec.action_size} numbers on each side")
        self._range = None if action_range is None else np.array(action_range, np.float32)
        if self._range is not None and not (self._range[0] < self._range[1]).all():
            raise ConfigError(
                "imitation.action_range: the lowest action must lie below the highest, number by number"
            )

    def episodes(self, most: int) -> list[tuple[list[Observation], Floats]]:
        """The first ones: what was seen, and what was done then [T, A] in −1 … 1."""
        tasks = self._tasks()
        found: list[tuple[list[Observation], Floats]] = []
        files = sorted((self._folder / "data").glob("chunk-*/*.parquet"))
        if not files:
            raise DataError(f"{self._folder} holds no data/chunk-*/*.parquet")
        columns = ["episode_index", "task_index", STATE, ACTION, *self._cameras.values()]
        for file in files:
            table = read_table(file, columns)
            if missing := set(columns) - table.keys():
                raise DataError(f"{file} has no column {', '.join(sorted(missing))}")
            actions_TA = self._scaled(
                _rows(table[ACTION], self._spec.action_size, f"{ACTION} in {file}"), file
            )
            states_TS = _rows(table[STATE], self._spec.state_size, f"{STATE} in {file}")
            numbers = np.array(table["episode_index"])
            for number in np.unique(numbers):
                rows = np.flatnonzero(numbers == number)
                seen = [self._observation(table, row, states_TS[row], tasks, file) for row in rows.tolist()]
                found.append((seen, actions_TA[rows]))
                if len(found) == most:
                    return found
        return found

    # --- inside -------------------------------------------------------------------------------------------

    def _check_size(self, features: Mapping[str, Any], name: str, size: int) -> None:
        if name not in features:
            raise DataError(f"{self._folder} has no {name!r}: it has {', '.join(sorted(features))}")
        if list(features[name]["shape"]) != [size]:
            raise ConfigError(
                f"{self._folder} is another robot's: its {name} has the shape {features[name]['shape']}, the "
                f"simulator's [{size}]"
            )

    def _check_camera(self, features: Mapping[str, Any], camera: str, name: str) -> None:
        kinds = {key: feature["dtype"] for key, feature in features.items()}
        if kinds.get(name) == "video":
            raise DataError(
                f"{self._folder} keeps {name!r} as video files, which are not read: record or convert it with its "
                "pictures in the parquet files (use_videos = false)"
            )
        if kinds.get(name) != "image":
            there = ", ".join(sorted(key for key, kind in kinds.items() if kind in ("image", "video")))
            raise DataError(
                f"{self._folder} has no pictures {name!r} for the camera {camera!r}: set imitation.cameras.{camera} to "
                f"one of {there or '(it has none)'}"
            )

    def _observation(
        self, table: Mapping[str, Any], row: int, state_S: Floats, tasks: Mapping[int, str], file: Path
    ) -> Observation:
        try:
            images = {camera: self._pixels(table[name][row]) for camera, name in self._cameras.items()}
            return Observation(state=state_S, images=images, instruction=tasks[table["task_index"][row]])
        except (OSError, TypeError, KeyError) as error:
            raise DataError(
                f"{file}, row {row + 1}: its picture or its task cannot be read: {error!r}"
            ) from error

    def _tasks(self) -> dict[int, str]:
        lines = self._folder / "meta" / "tasks.jsonl"
        if lines.is_file():
            found = {}
            for number, line in enumerate(lines.read_bytes().splitlines(), start=1):
                try:
                    if line.strip():
                        row = json.loads(line)
                        found[row["task_index"]] = str(row["task"])
                except (ValueError, TypeError, KeyError) as error:
                    raise DataError(f"{lines}, line {number}: no task with its number: {error!r}") from error
            return found
        table = read_table(self._folder / "meta" / "tasks.parquet")
        numbers = table.pop("task_index")
        (words,) = table.values()  # the index of a table of pandas, whose column may have any name
        return dict(zip(numbers, words, strict=True))

    def _scaled(self, actions_TA: Floats, file: Path) -> Floats:
        if self._range is not None:
            low_A, high_A = self._range
            actions_TA = (2.0 * (actions_TA - low_A) / (high_A - low_A) - 1.0).astype(np.float32)
        largest = float(np.abs(actions_TA).max(initial=0.0))
        if largest > 1.0 + 1e-3:
            raise ConfigError(
                f"{file} has actions up to {largest:g}, a simulator takes −1 … 1: set imitation.action_range to the "
                "lowest and the highest action that the robot takes"
            )
        return actions_TA

    def _pixels(self, picture: Any) -> Pixels:
        opened = pillow().Image.open(io.BytesIO(picture["bytes"])).convert("RGB")
        size = self._spec.image_size
        pixels: Pixels = np.asarray(opened if opened.size == (size, size) else opened.resize((size, size)))
        return pixels


def _rows(column: Sequence[Any], size: int, name: str) -> npt.NDArray[np.float32]:
    """[T, size]; a feature of one number is a number."""
    rows = np.zeros((len(column), size), np.float32)
    for number, value in enumerate(column):
        try:
            rows[number] = np.array(value, np.float32).reshape(size)
        except (TypeError, ValueError):
            rows[number] = np.nan
        if not np.isfinite(rows[number]).all():
            raise DataError(f"{name}, row {number + 1}: not {size} finite numbers: {value!r:.80}")
    return rows
