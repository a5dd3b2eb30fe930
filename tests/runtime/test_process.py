"""The agent's own acts on its children."""

from __future__ import annotations

import os
import signal
import time

from rill.runtime.process.agent import _kill_child


def test_a_child_is_killed_also_before_it_has_a_group_of_its_own() -> None:
    pid = os.fork()
    if pid == 0:
        time.sleep(60.0)  # as if setsid() were still to come
        os._exit(0)
    _kill_child(pid)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
