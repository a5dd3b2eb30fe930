"""New weights for the engine: read, verified and compared with the model before the engine hears of them.

    a manifest, or a folder ──▶ newer? ──▶ names and shapes ──▶ every byte, verified ──▶ Engine.update_weights
                                 409           409                     502                       503
                                                                                     only here is something at stake

Up to the last arrow the engine has not been touched: whatever is wrong with an update, the old weights stay in service.
The price is one copy of the weights in this machine's memory while they change hands. A trainer in another process
publishes with rill.weights and sends the manifest here; see target.py for its side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from rill.errors import RillError, WeightSyncError
from rill.inference.base import Engine, NamedTensors
from rill.inference.checkpoint import Checkpoint
from rill.inference.parameters import check_shapes, expected_shapes
from rill.inference.server.errors import ApiError, bad_request
from rill.inference.server.schemas import ManifestBody, UpdateWeightsBody
from rill.models.loading import ModelConfig
from rill.types import PolicyVersion
from rill.weights import Receiver, Verify, WeightManifest, open_receiver
from rill.weights.base import TRANSPORTS
from rill.weights.disk import DiskReceiver

MANIFEST = "manifest.json"


class WeightInbox:
    """Takes weights in for one engine. Its methods block; the caller sees to it that they run one at a time."""

    def __init__(self, engine: Engine, model: ModelConfig | None) -> None:
        self._engine = engine
        self._model = model
        self._receivers: dict[str, Receiver] = {}
        self.failure: str | None = None
        """Why the engine is without usable weights; cleared by an update that succeeds."""

    def update(self, body: UpdateWeightsBody) -> PolicyVersion:
        """What /update_weights asks for; the version that the engine then has."""
        if body.manifest is not None:
            return self.pull(body.manifest.to_manifest())
        if body.weight_dir is None:
            raise bad_request("say where the weights are: `manifest`, or `weight_dir`", "weight_dir")
        folder = Path(body.weight_dir)
        if not _is(folder / MANIFEST, Path.is_file):
            return self.load(folder, body.version, partial=body.partial)
        manifest = self._read_manifest(folder)
        if body.version not in (None, int(manifest.version)):
            raise bad_request(f"the folder holds version {manifest.version}, not {body.version}", "version")
        return self.pull(manifest)

    def pull(self, manifest: WeightManifest) -> PolicyVersion:
        """A version that was published by rill.weights."""
        self._refuse_old(manifest.version)
        try:
            manifest.check()
        except WeightSyncError as error:
            raise bad_request(f"the manifest contradicts itself: {error}", "manifest") from error
        self._refuse_misfits({spec.name: spec.shape for spec in manifest.tensors}, partial=False)
        receiver = self._receiver(manifest.transport)
        try:
            tensors = [(name, tensor.clone()) for name, tensor in receiver.pull(manifest)]
        except WeightSyncError as error:
            raise _from_source(error) from error
        try:
            return self._hand_over(tensors, manifest.version, partial=False)
        except RillError:
            # The receiver holds a version that the engine does not: start again from nothing.
            self._receivers.pop(manifest.transport).close()
            raise

    def load(self, folder: Path, version: int | None, *, partial: bool) -> PolicyVersion:
        """A folder of safetensors, as transformers and prime-rl write it. Unset version: one more than the engine's."""
        new = PolicyVersion(self._engine.version + 1 if version is None else version)
        self._refuse_old(new)
        checkpoint = Checkpoint.from_folder(folder)
        try:
            shapes = checkpoint.shapes()
        except WeightSyncError as error:
            raise _from_source(error) from error
        self._refuse_misfits(shapes, partial=partial)
        return self._hand_over(checkpoint, new, partial=partial)

    def reload(self) -> PolicyVersion:
        """The weights that the server started with, under a new version: a version never goes down."""
        if self._model is None or self._model.path is None:
            raise ApiError(409, "the model was not loaded from a folder, so there is nothing to reload")
        return self.load(Path(self._model.path), None, partial=False)

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()
        self._receivers.clear()

    def _hand_over(self, tensors: NamedTensors, version: PolicyVersion, *, partial: bool) -> PolicyVersion:
        try:
            self._engine.update_weights(tensors, version, partial=partial)
        except WeightSyncError as error:
            self.failure = str(error)
            raise ApiError(
                503, f"the engine could not take version {version}: {error}; it needs whole weights now"
            ) from error
        self.failure = None
        return version

    def _refuse_old(self, version: PolicyVersion) -> None:
        if version <= self._engine.version:
            raise ApiError(
                409,
                f"version {version} is not newer than {self._engine.version}, which is in service: versions only grow",
                code="stale_version",
            )

    def _refuse_misfits(self, shapes: Mapping[str, tuple[int, ...]], *, partial: bool) -> None:
        if self._expected is None:
            return
        try:
            check_shapes(shapes, self._expected, partial=partial)
        except WeightSyncError as error:
            raise ApiError(
                409,
                f"these are not this model's weights: {error}; the old ones stay in service",
                code="misfit",
            ) from error

    @cached_property
    def _expected(self) -> dict[str, tuple[int, ...]] | None:
        """None where the server was not told which model it serves: the engine then finds out for itself."""
        return None if self._model is None else expected_shapes(self._model)

    def _receiver(self, transport: str) -> Receiver:
        """Kept between updates: a receiver of differences needs what it had."""
        if transport not in self._receivers:
            config = TRANSPORTS.load(transport).Config(verify=Verify.FULL)
            self._receivers[transport] = open_receiver(config)
        return self._receivers[transport]

    def _read_manifest(self, folder: Path) -> WeightManifest:
        receiver = self._receiver("disk")
        assert isinstance(receiver, DiskReceiver)
        try:
            text = receiver.fetch(str(folder.parent), f"{folder.name}/{MANIFEST}")
            manifest = ManifestBody.model_validate_json(text).to_manifest()
        except WeightSyncError as error:
            raise _from_source(error) from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "it"
            message = f"{folder}/{MANIFEST} is damaged or half-written: {where}: {first['msg']}"
            raise _from_source(WeightSyncError(message)) from error
        # Where it lies is what we were told: the publisher's name for that place may be another machine's.
        return replace(manifest, transport="disk", location=str(folder.parent))


def _from_source(error: WeightSyncError) -> ApiError:
    return ApiError(502, f"{error}. The old weights stay in service", code="bad_weights")


def _is(path: Path, kind: Callable[[Path], bool]) -> bool:
    try:
        return kind(path)
    except (OSError, ValueError):  # a null byte, or a path we may not read
        return False
