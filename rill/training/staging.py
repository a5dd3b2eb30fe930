"""A trainer's state on its way to host memory, while training goes on.

    trainer's thread   save() ──▶ rollout, forward, backward ──▶ step(): waits for the copy, which is mostly long done
    writer's thread       └────▶ copy to the host ──▶ files

Caller: rill.training.checkpoint. On a GPU the copies run on a stream of their own into pinned memory, which is dear to
make and is kept for the next save; the step waits on the device, where it would change what is being read. Where the
trainer has left the device to others its state lies on the host already, and is copied from there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rill.errors import StuckError
from rill.training.offload import Shelf, pinned_like

COPY_TIMEOUT_S = 600.0


class Staging:
    """Host memory for the state of one engine, and the stream that fills it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned: dict[str, Tensor] = {}

    def to_host(self, name: str, value: Any) -> Any:
        """On a GPU only queued, on the current stream."""
        if isinstance(value, DTensor):
            return _with_parts(value, lambda part, tensor: self.to_host(f"{name}.{part}", tensor))
        if not isinstance(value, Tensor):
            return value
        if value.device.type == "cpu":
            return value.detach().clone()
        host = self._pinned.get(name)
        if host is None or host.shape != value.shape or host.dtype != value.dtype:
            host = self._pinned[name] = pinned_like(value)
        return host.copy_(value.detach(), non_blocking=True)


class StateCopy:
    """Of a state as it is when this is made: nothing of it may change before `wait` has returned."""

    def __init__(self, staging: Staging, state: Mapping[str, Any], shelf: Shelf | None = None) -> None:
        """`shelf`: where all of it lies on the host, to be read there."""
        self._staging = staging
        self._state = state if shelf is None else {n: _on_shelf(shelf, v) for n, v in state.items()}
        self._is_queued = threading.Event()
        self._made: torch.cuda.Event | None = None
        self._copied: torch.cuda.Event | None = None
        if staging.stream is not None:
            self._made = torch.cuda.current_stream(staging.device).record_event()

    @torch.no_grad()
    def run(self) -> dict[str, Any]:
        """By the writer's thread: the copy, whole."""
        stream = self._staging.stream
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                if stream is not None and self._made is not None:
                    stream.wait_event(self._made)
                staged = {name: self._staging.to_host(name, value) for name, value in self._state.items()}
                self._copied = stream.record_event() if stream is not None else None
        finally:
            self._is_queued.set()
        if self._copied is not None:
            self._copied.synchronize()
        self._state = {}  # not before: memory that is given back is given to others
        return staged

    def wait(self) -> None:
        """By the trainer's thread: whatever it does, or queues on its stream, after this may change the state."""
        if not self._is_queued.wait(COPY_TIMEOUT_S):
            raise StuckError(f"checkpoint: the state was not copied to host memory in {COPY_TIMEOUT_S:.0f} s")
        if self._copied is not None:
            torch.cuda.current_stream(self._staging.device).wait_event(self._copied)


def _on_shelf(shelf: Shelf, value: Any) -> Any:
    if isinstance(value, DTensor):
        return _with_parts(value, lambda _, tensor: _on_shelf(shelf, tensor))
    host = shelf.host_of(value) if isinstance(value, Tensor) else None
    return value if host is None else host  # a counter of steps is on the host anyway


def _with_parts(value: DTensor, replaced: Callable[[str, Tensor], Tensor]) -> Any:
    """The same tensor of other parts. DTensor.from_local would move them back to the mesh's device."""
    parts, about = value.__tensor_flatten__()  # type: ignore[no-untyped-call]
    others = {part: replaced(part, getattr(value, part)) for part in parts}
    return DTensor.__tensor_unflatten__(others, about, value.shape, value.stride())  # type: ignore[no-untyped-call]
