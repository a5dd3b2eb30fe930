"""Weights out of a device's memory and back, with every tensor and view over them still valid afterwards."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class WeightOffload:
    """Holds pinned copies of parameters whose device storage has been given back."""

    def __init__(self) -> None:
        self._held: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    def offload(self, parameters: Iterable[torch.Tensor], device: torch.device) -> None:
        seen: set[int] = set()
        for tensor in parameters:
            storage = tensor.untyped_storage()
            if storage.data_ptr() in seen:
                continue  # tied, or parts of one joined projection
            seen.add(storage.data_ptr())
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
            host.copy_(_bytes_of(storage, device), non_blocking=True)
            self._held.append((storage, host))
        torch.cuda.synchronize(device)
        for storage, _ in self._held:
            storage.resize_(0)
        torch.cuda.empty_cache()

    def reload(self, device: torch.device) -> None:
        for storage, host in self._held:
            storage.resize_(host.numel())
            _bytes_of(storage, device).copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        self._held.clear()


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
