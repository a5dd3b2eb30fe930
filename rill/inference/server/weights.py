"""New weights for the engine: compared with the model before the engine hears of them.

    a folder of safetensors ──▶ newer? ──▶ can be read? ──▶ names and shapes ──▶ Engine.update_weights
                                 409           502                409                  503
                                                                          only here is something at stake

Up to the last arrow the engine has not been touched: whatever is wrong with an update, the old weights stay in service.
The engine reads the files itself, a tensor at a time; replicas all read the same ones. A folder in shared memory
(/dev/shm) costs no disk.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path

from rill.errors import WeightSyncError
from rill.inference.base import Engine
from rill.inference.parameters import TIED_HEAD, Checkpoint, check_shapes, expected_shapes
from rill.inference.server.errors import ApiError
from rill.models.loading import ModelConfig
from rill.types import PolicyVersion


class WeightInbox:
    """Takes weights in for one engine. Its methods block; the caller sees to it that they run one at a time."""

    def __init__(self, engine: Engine, model: ModelConfig | None) -> None:
        self._engine = engine
        self._model = model
        self.failure: str | None = None
        """Why the engine is without usable weights; cleared by an update that succeeds."""

    def load(self, folder: Path, version: int | None, *, partial: bool) -> PolicyVersion:
        """A folder of safetensors, as transformers and prime-rl write it. Unset version: one more than the engine's."""
        new = PolicyVersion(self._engine.version + 1 if version is None else version)
        if new <= self._engine.version:
            message = f"version {new} is not newer than {self._engine.version}: versions only grow"
            raise ApiError(409, message, code="stale_version")
        checkpoint = self._checked(folder, partial=partial)
        try:
            self._engine.update_weights(checkpoint, new, partial=partial)
        except WeightSyncError as error:
            self.failure = str(error)
            message = f"the engine could not take version {new}: {error}; it needs whole weights now"
            raise ApiError(503, message) from error
        self.failure = None
        return new

    def reload(self) -> PolicyVersion:
        """The weights that the server started with, under a new version: a version never goes down."""
        if self._model is None or self._model.path is None:
            raise ApiError(409, "the model was not loaded from a folder, so there is nothing to reload")
        return self.load(Path(self._model.path), None, partial=False)

    def _checked(self, folder: Path, *, partial: bool) -> Checkpoint:
        try:
            checkpoint = Checkpoint.from_folder(folder)
            shapes = checkpoint.shapes()
            if self._expected is not None and shapes.keys() - self._expected.keys() - {TIED_HEAD}:
                checkpoint = replace(checkpoint, model=self._model)
                shapes = checkpoint.shapes()
        except WeightSyncError as error:
            message = f"{error}. The old weights stay in service"
            raise ApiError(502, message, code="bad_weights") from error
        try:
            if self._expected is not None:
                check_shapes(shapes, self._expected, partial=partial)
        except WeightSyncError as error:
            message = f"these are not this model's weights: {error}; the old ones stay in service"
            raise ApiError(409, message, code="misfit") from error
        return checkpoint

    @cached_property
    def _expected(self) -> dict[str, tuple[int, ...]] | None:
        """None where the server was not told which model it serves: the engine then finds out for itself."""
        return None if self._model is None else expected_shapes(self._model)
