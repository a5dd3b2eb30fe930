"""MuJoCo: a compiled scene, its steps, and pictures of it without OpenGL.

The one door to mujoco; simulators with a scene of their own use it, and adapters whose library brings MuJoCo models.
A picture is a ray for every pixel (mj_multiRay), shaded by the angle to the camera: headless, the same bits everywhere,
fast on scenes of primitives. Colours come from geoms and their materials.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rill.registry import import_extra
from rill.types import Pixels

BACKGROUND = (214, 222, 232)
AMBIENT = 0.55


def mujoco() -> Any:
    return import_extra("mujoco", 'mujoco is not installed: pip install "rill[robots]"')


def mjx() -> tuple[Any, Any]:
    """(mujoco.mjx, jax)."""
    # A policy has memory on the device, too: JAX takes what it needs and not three quarters of it at once.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # A process that is started again, and the next run, find what was compiled.
    cache = Path(os.environ.get("RILL_CACHE") or Path.home() / ".cache" / "rill")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache / "jax"))
    needs = 'MJX is not installed: pip install "rill[mjx]"'
    return import_extra("mujoco.mjx", needs), import_extra("jax", needs)


class Scene:
    """A model and its data, from MJCF text."""

    def __init__(self, xml: str) -> None:
        self._mujoco = mujoco()
        self.model: Any = self._mujoco.MjModel.from_xml_string(xml)
        self.data: Any = self._mujoco.MjData(self.model)

    def reset(self) -> None:
        self._mujoco.mj_resetData(self.model, self.data)

    def forward(self) -> None:
        self._mujoco.mj_forward(self.model, self.data)

    def step(self, num_substeps: int) -> None:
        self._mujoco.mj_step(self.model, self.data, num_substeps)

    def touched_by(self, geom: int) -> set[int]:
        """Geoms in contact with `geom` now."""
        if not self.data.ncon:
            return set()
        pairs = self.data.contact.geom
        touching = pairs[(pairs == geom).any(axis=1)]
        return set(touching.ravel().tolist()) - {geom}

    def geom(self, name: str) -> int:
        return int(self.model.geom(name).id)


class RayCamera:
    """A fixed or moving camera of a model, as pixels by rays."""

    def __init__(self, model: Any, camera: str, size: int) -> None:
        self._mujoco = mujoco()
        self._model = model
        self._camera = int(model.camera(camera).id)
        self._size = size
        half = np.tan(np.radians(model.cam_fovy[self._camera]) / 2)
        steps = (np.arange(size) + 0.5) / size * 2 - 1
        across, down = np.meshgrid(steps * half, -steps * half)
        rays = np.stack([across, down, -np.ones_like(across)], axis=-1).reshape(-1, 3)
        self._rays = rays / np.linalg.norm(rays, axis=1, keepdims=True)
        self._colours = _colours(model)
        self._has_large_bodies = bool((model.body_geomnum[1:] > 1).any())

    def picture(self, data: Any) -> Pixels:
        rotation = data.cam_xmat[self._camera].reshape(3, 3)
        origin = np.ascontiguousarray(data.cam_xpos[self._camera])
        hits, distances = self.cast(data, origin, np.ascontiguousarray(self._rays @ rotation.T))
        pixels = np.empty((len(hits), 3), np.float32)
        pixels[:] = BACKGROUND
        seen = hits >= 0
        # The angle between ray and surface is not given; the gradient of the distance stands for it.
        light = _shading(np.where(seen, distances, np.nan).reshape(self._size, self._size)).ravel()
        pixels[seen] = self._colours[hits[seen]] * light[seen, None]
        return np.clip(pixels, 0, 255).astype(np.uint8).reshape(self._size, self._size, 3)

    def cast(
        self, data: Any, origin: npt.NDArray[Any], rays: npt.NDArray[Any]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
        """(the geom that each ray meets or −1, how far away). mj_multiRay misses geoms of bodies that have several
        (seen with MuJoCo 3.3): there every ray is cast by itself: 11 ms in place of 2 for 64 pixels of
        the arm's scene."""
        hits, distances = np.full(len(rays), -1, np.int32), np.full(len(rays), -1.0)
        if self._has_large_bodies:
            found = np.zeros(1, np.int32)
            for number, ray in enumerate(rays):
                distances[number] = self._mujoco.mj_ray(self._model, data, origin, ray, None, 1, -1, found)
                hits[number] = found[0]
        else:
            self._mujoco.mj_multiRay(
                self._model, data, origin, rays.ravel(), None, 1, -1, hits, distances, len(rays), 100.0
            )
        return hits, distances


def _colours(model: Any) -> npt.NDArray[np.float32]:
    """0 … 255 by geom, its material's where it has one."""
    rgba = np.where(
        (model.geom_matid >= 0)[:, None],
        model.mat_rgba[np.maximum(model.geom_matid, 0)] if model.nmat else model.geom_rgba,
        model.geom_rgba,
    )
    colours: npt.NDArray[np.float32] = (rgba[:, :3] * 255).astype(np.float32)
    return colours


def _shading(depth: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """AMBIENT where the surface turns away, 1 where it faces the camera."""
    filled = np.nan_to_num(depth, nan=float(np.nanmax(depth)) if np.isfinite(depth).any() else 1.0)
    rows, columns = np.gradient(filled)
    slope = np.hypot(rows, columns) * len(depth) / np.maximum(filled, 1e-6) / 4
    light: npt.NDArray[Any] = AMBIENT + (1 - AMBIENT) / np.sqrt(1 + slope**2)
    return light
