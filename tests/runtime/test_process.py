"""The agent's own acts on its children."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest

from rill.runtime.process import agent
from rill.runtime.process.agent import Agent, AgentSpec, Exited, Start, _kill_child


def test_a_child_is_killed_also_before_it_has_a_group_of_its_own() -> None:
    pid = os.fork()
    if pid == 0:
        time.sleep(60.0)  # as if setsid() were still to come
        os._exit(0)
    _kill_child(pid)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def an_agent(preload: tuple[str, ...] = ()) -> tuple[Agent, Connection[Any, Any]]:
    """Whose loop does not run, and the driver's end of its pipe."""
    ours, its = Pipe()
    return Agent(AgentSpec("", "", [], preload), its), ours


def a_start(folder: Path, *, restart: bool = False) -> Start:
    return Start(key="w[0]#0", entry="os:_exit", payload=b"", log_path=str(folder / "log"), restart=restart)


def test_what_a_child_has_started_is_killed_while_the_childs_number_is_still_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, driver = an_agent()
    pid = os.fork()
    if pid == 0:
        os._exit(3)
    here.children[pid] = (a_start(tmp_path), [time.monotonic()])

    def kill_group(group: int) -> None:
        assert group == pid
        os.kill(pid, 0)  # it is there, though it has ended

    monkeypatch.setattr(agent, "_kill_group", kill_group)
    deadline_s = time.monotonic() + 60
    while not driver.poll() and time.monotonic() < deadline_s:
        here._reap()
    assert driver.recv() == Exited("w[0]#0", pid, "exit code 3", False, False)


@pytest.mark.parametrize("restart", [False, True])
def test_a_process_that_cannot_be_forked_is_told_and_the_agent_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restart: bool
) -> None:
    def no_room() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    here, driver = an_agent()
    monkeypatch.setattr(agent.os, "fork", no_room)
    here._handle(a_start(tmp_path, restart=restart))
    told = driver.recv()
    assert (told.key, told.is_service, told.is_restarted) == ("w[0]#0", restart, False)
    assert "could not be started (BlockingIOError: [Errno 11] Resource temporarily unavailable)" in told.how


def test_a_module_that_workers_need_and_that_cannot_be_imported_is_told_with_the_worker(
    tmp_path: Path,
) -> None:
    here, driver = an_agent(("no_such_module",))
    here._handle(a_start(tmp_path))
    assert "ModuleNotFoundError: No module named 'no_such_module'" in driver.recv().how
