from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rill.errors import StuckError
from rill.runtime.process.supervisor import Supervisor


def test_ctrl_c_while_workers_start_is_not_lost_behind_a_kill_that_takes_long() -> None:
    def interrupted(timeout_s: float) -> None:
        raise KeyboardInterrupt

    def slow(name: str, timeout_s: float) -> None:
        raise StuckError("actor[0]#0 did not end within 10 s of its kill")

    starting = SimpleNamespace(processes=[SimpleNamespace(ready=SimpleNamespace(wait=interrupted))])
    supervisor: Any = SimpleNamespace(_group=lambda name: starting, close_group=slow)
    with pytest.raises(KeyboardInterrupt):
        Supervisor.wait_ready(supervisor, "actor", 1.0)
