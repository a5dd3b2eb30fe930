"""Notices that a process of this machine has ended: at once where the kernel has pidfds, else within half a second.

A recycled pid is not taken for the process: with pidfds the kernel holds the identity, else the start time does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import psutil
import zmq


class ProcessWatch:
    """Names with pids; used by the hub's poll loop."""

    def __init__(self) -> None:
        self._fd_of: dict[str, int] = {}
        self._name_of: dict[int, str] = {}
        self._polled: dict[str, tuple[int, float]] = {}
        self._new: list[int] = []
        self._dead: list[str] = []

    @staticmethod
    @cache
    def machine_id() -> str:
        """Equal for two processes that can watch each other by pid: same boot, same pid namespace."""
        boot_id = Path("/proc/sys/kernel/random/boot_id")
        if not boot_id.exists():
            return os.uname().nodename
        return f"{boot_id.read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"

    def add(self, name: str, pid: int) -> None:
        """Watch `pid` under `name`; one that is gone already is reported by the next `find_dead`."""
        try:
            if hasattr(os, "pidfd_open"):
                fd = os.pidfd_open(pid)
                self._fd_of[name] = fd
                self._name_of[fd] = name
                self._new.append(fd)
            else:
                self._polled[name] = (pid, psutil.Process(pid).create_time())
        except (ProcessLookupError, psutil.NoSuchProcess):
            self._dead.append(name)

    def register_with(self, poller: zmq.Poller) -> None:
        for fd in self._new:
            poller.register(fd, zmq.POLLIN)
        self._new.clear()

    def is_watched(self, name: str) -> bool:
        return name in self._fd_of or name in self._polled

    def num_alive(self) -> int:
        """How many watched processes still run."""
        poller = zmq.Poller()
        for fd in self._name_of:
            poller.register(fd, zmq.POLLIN)
        return len(self._name_of) - len(poller.poll(0)) + len(self._polled)

    def find_dead(self, poller: zmq.Poller, ready: Mapping[object, int]) -> list[str]:
        """Names whose processes have ended, by the last poll's result; they are no longer watched."""
        dead, self._dead = self._dead, []
        for fd in ready:
            if not isinstance(fd, int) or fd not in self._name_of:
                continue
            name = self._name_of.pop(fd)
            del self._fd_of[name]
            poller.unregister(fd)
            os.close(fd)
            dead.append(name)
        for name, (pid, created_s) in list(self._polled.items()):
            try:
                is_alive = psutil.Process(pid).create_time() == created_s
            except psutil.NoSuchProcess:
                is_alive = False
            if not is_alive:
                del self._polled[name]
                dead.append(name)
        return dead
