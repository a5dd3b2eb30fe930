"""A sandbox made by bubblewrap (`apt install bubblewrap`): namespaces of its own for processes, network and files.

    rill ── pipe ──▶ bwrap ── a new root: libraries read-only, /sandbox and /tmp in memory ──▶ guest.py ──▶ programs

The default, and the quickest. Chosen by rill.envs.sandbox.base; what is said through the pipe is session.py's.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from rill.envs.sandbox.base import Limits
from rill.envs.sandbox.session import ENVIRONMENT, GUEST, GUEST_CHECKS, START_S, Sandbox, start_guest
from rill.errors import UnsupportedError

INSTALL = "install it with `apt install bubblewrap` (Fedora: dnf, Arch: pacman -S bubblewrap)"


class Bubblewrap(Sandbox):
    """One session."""

    @classmethod
    async def open(cls, limits: Limits, *, packages: bool = False) -> Bubblewrap:
        session = cls(await start_guest(command(limits, packages=packages), env={}), limits)
        await session.greet({"packages": _package_folders() if packages else [], "contained": False})
        return session

    @staticmethod
    def check() -> None:
        """Raises UnsupportedError."""
        _bwrap()


def command(limits: Limits, *, packages: bool) -> list[str]:
    """Raises UnsupportedError where bubblewrap is absent or may not do its work here."""
    bwrap, is_root = _bwrap(), os.geteuid() == 0
    users = (
        ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # the guest becomes nobody first of all
        if is_root
        else ["--unshare-user", "--disable-userns"]
    )
    return [
        bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try",
        *users, "--die-with-parent", "--new-session", "--clearenv",
        *(word for key, value in _ENVIRONMENT.items() for word in ("--setenv", key, value)),
        "--proc", "/proc", "--dev", "/dev",
        *(word for folder in ("/sandbox", "/tmp") for word in
          ("--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", folder)),
        *_readable(packages), "--ro-bind", str(GUEST), "/guest.py", "--ro-bind", str(GUEST_CHECKS), "/guest_checks.py",
        "--chdir", "/sandbox",
        os.path.realpath(sys.executable), "-I", "-S", "/guest.py",
    ]  # fmt: skip


_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", **ENVIRONMENT}


def _readable(packages: bool) -> list[str]:
    """The system's libraries and programs, and Python's own files."""
    words: list[str] = []
    for folder in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        place = Path(folder)
        if place.is_symlink():
            words += ["--symlink", str(place.readlink()), folder]
        elif place.is_dir():
            words += ["--ro-bind", folder, folder]
    words += ["--ro-bind", "/usr", "/usr", "--perms", "0755", "--dir", "/etc"]
    for path in ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"):
        words += ["--ro-bind-try", path, path]
    python = {sys.base_prefix, str(Path(os.path.realpath(sys.executable)).parents[1])}
    for folder in sorted(python | set(_package_folders() if packages else ())):
        if not folder.startswith("/usr/") and folder != "/usr":
            for parent in reversed(Path(folder).parents[:-1]):  # or they would be root's alone
                words += ["--perms", "0755", "--dir", str(parent)]
            words += ["--ro-bind", folder, folder]
    return words


def _package_folders() -> list[str]:
    paths = sysconfig.get_paths()
    return list(dict.fromkeys(os.path.realpath(paths[name]) for name in ("purelib", "platlib")))


@functools.lru_cache(maxsize=1)
def _bwrap() -> str:
    """Tried once: namespaces may be forbidden where the program is there."""
    found = shutil.which("bwrap")
    if found is None:
        raise UnsupportedError(f"programs nobody has read run in bubblewrap, which is not here: {INSTALL}")
    places = ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    probe = [found, "--unshare-pid", "--unshare-net", *places, "true"]
    try:
        done = subprocess.run(probe, capture_output=True, timeout=START_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnsupportedError(f"bubblewrap cannot be started: {error}") from error
    if done.returncode != 0:
        raise UnsupportedError(
            f"bubblewrap may not isolate programs on this machine ({done.stderr.decode(errors='replace').strip()}): "
            "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, or a container with CAP_SYS_ADMIN)"
        )
    return found
