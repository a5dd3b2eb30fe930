"""Stand-in."""

from __future__ import annotations
from typing import Any


class LockService:
    def __init__(self, machine: Any) -> None: ...
    def handlers(self) -> dict[str, Any]:
        return {}

    def queries(self) -> dict[str, Any]:
        return {}

    def members_changed(self) -> None: ...
    def channel_changed(self, name: str) -> None: ...
    def end_client(self, client: str) -> None: ...
