"""A sandbox made of a container, by the CLI of docker or podman; `runtime="runsc"` makes it gVisor's.

    rill ── pipe ──▶ docker exec ──▶ guest.py ──▶ programs, in one container for each session
         ── pipe ──▶ a watch (sh) that has started the container, and removes it when this pipe ends

For images of the user's own, machines without bubblewrap, and kernels that programs should not come near. The image
needs Python 3.10, for the guest. The pipe of the watch ends with close(), or with the process that held it, however it
died; should the watch be killed too, the container ends by itself after `life_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import select
import shutil
import subprocess
import threading
from dataclasses import dataclass
from typing import Any

from rill.envs.sandbox.base import Limits, SandboxError
from rill.envs.sandbox.session import ENVIRONMENT, GUEST, GUEST_CHECKS, START_S, Sandbox, start_guest
from rill.errors import UnsupportedError

CLIS = ("docker", "podman")
ASK_S, PULL_S, STOP_S = 20.0, 900.0, 30.0
INSTALL = "install one, e.g. `apt install podman` (Fedora: dnf, Arch: pacman -S podman), or docker"
WATCH = """cli=$1 name=$2; shift 2
"$cli" run -d --rm --name "$name" "$@" </dev/null >/dev/null && echo up && read -r _
"$cli" rm -f "$name" </dev/null >/dev/null 2>&1"""
IDLE = "import signal, time; signal.signal(signal.SIGCHLD, signal.SIG_IGN); time.sleep({})"
"""The first process: buries orphans, and ends in the end."""
PROBE = "import sys; sys.exit(f'rill needs Python 3.10 in it, not {sys.version}' if sys.version_info < (3, 10) else 0)"
USER_TASKS = 16_384
"""Of the user, who may be that of all containers. Podman's own default is more than many a machine allows."""
_PREPARING = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of `open_sandbox("container", …)` and SandboxPool."""

    image: str = ""
    cli: str = ""
    """"docker" or "podman"; unset: the first that answers."""
    runtime: str = ""
    """An OCI runtime that the CLI knows: "runsc" (gVisor), "kata" …; unset: its default."""
    network: bool = False
    user: str = "65534:65534"
    """Without rights either way; "root" where programs have to change the image's files."""
    read_only: bool = True
    """Off: the image's files can be changed, in a layer that goes with the session and is not limited in size."""
    python: str = "python3"
    """The image's interpreter."""
    life_s: int = 24 * 3600


class Container(Sandbox):
    """One session."""

    def __init__(
        self, process: asyncio.subprocess.Process, limits: Limits, watch: subprocess.Popen[bytes]
    ) -> None:
        super().__init__(process, limits)
        self._watch = watch

    @classmethod
    async def open(cls, limits: Limits, *, packages: bool = False, **options: Any) -> Container:
        chosen = Options(**options)
        cli = await asyncio.to_thread(prepare, chosen, limits)
        name = f"rill-{os.getpid()}-{secrets.token_hex(6)}"
        first = [*run_words(chosen, limits), "-I", "-S", "-c", IDLE.format(chosen.life_s)]
        # No process of asyncio's, which would be killed with its event loop.
        watch = subprocess.Popen(
            ["sh", "-c", WATCH, "sh", cli, name, *first],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=_environment(chosen), start_new_session=True,
        )  # fmt: skip
        try:
            await asyncio.to_thread(_wait_until_up, watch)
            isolated = ["-I"] if packages else ["-I", "-S"]
            guest = [chosen.python, *isolated, "-c", GUEST.read_text(), GUEST_CHECKS.read_text()]
            process = await start_guest([cli, "exec", "-i", name, *guest], env=_environment(chosen))
        except BaseException:
            _let_go(watch)
            raise
        session = cls(process, limits, watch)
        await session.greet({"packages": [], "contained": True})
        return session

    async def close(self) -> None:
        """Returns when the container is gone."""
        if self._is_closed:
            return
        _let_go(self._watch)
        await super().close()
        await asyncio.to_thread(_wait_until_gone, self._watch)

    @staticmethod
    def check(**options: Any) -> None:
        """Raises UnsupportedError. May pull the image, and starts one container."""
        prepare(Options(**options), Limits())


def run_words(options: Options, limits: Limits) -> list[str]:
    """What stands between `run` and the arguments of the interpreter."""
    memory = (
        limits.memory_bytes + 2 * limits.disk_bytes
    )  # of all processes, and of the files, which are in it
    own = 256 if "runsc" in options.runtime else 4  # gVisor's kernel is counted with the programs
    files = f"rw,exec,nosuid,nodev,mode=1777,size={limits.disk_bytes}"
    return [
        *(["--runtime", options.runtime] if options.runtime else []),
        *([] if options.network else ["--network", "none"]),
        *(["--read-only"] if options.read_only else []),
        "--user", options.user, "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
        "--memory", str(memory), "--memory-swap", str(memory), "--pids-limit", str(limits.num_processes + own),
        "--ulimit", f"nofile={limits.num_files}:{limits.num_files}", "--ulimit", "core=0:0",
        "--ulimit", f"nproc={USER_TASKS}:{USER_TASKS}",
        "--tmpfs", f"/sandbox:{files}", "--tmpfs", f"/tmp:{files}", "--workdir", "/sandbox",
        *(word for key, value in ENVIRONMENT.items() for word in ("--env", f"{key}={value}")),
        "--stop-signal", "KILL", "--entrypoint", options.python, options.image,
    ]  # fmt: skip


def prepare(options: Options, limits: Limits) -> str:
    """The CLI. Once in a process for the same wishes; raises UnsupportedError where they cannot be had."""
    if not options.image:
        raise UnsupportedError(
            'a container needs an image: name one that has Python, e.g. "python:3.12-slim"'
        )
    with _PREPARING:
        return _prepared(options, limits)


@functools.cache
def _prepared(options: Options, limits: Limits) -> str:
    cli, image = find_cli(options.cli), options.image
    if _ask([cli, "image", "inspect", image], ASK_S) is not None:
        problem = _ask([cli, "pull", "-q", image], PULL_S)
        if problem is not None:
            raise UnsupportedError(
                f"the image {image} is not here and cannot be pulled ({problem}): name another, or bring it with "
                f"`{os.path.basename(cli)} load`"
            )
    probe = [cli, "run", "--rm", *run_words(options, limits), "-I", "-S", "-c", PROBE]
    problem = _ask(probe, START_S, _environment(options))
    if problem is not None:
        what = f"a container of {image}" + (f" with the runtime {options.runtime}" if options.runtime else "")
        gvisor = ": install gVisor (gvisor.dev/docs/user_guide/install, then `runsc install` for docker)"
        raise UnsupportedError(
            f"{what} does not start ({problem}){gvisor if options.runtime == 'runsc' else ''}"
        )
    return cli


def find_cli(wanted: str = "") -> str:
    """The program that answers. Raises UnsupportedError with what each of them says."""
    names = (wanted,) if wanted else CLIS
    found = [path for name in names if (path := shutil.which(name)) is not None]
    if not found:
        raise UnsupportedError(f"containers need {' or '.join(names)}, which is not here: {INSTALL}")
    problems: list[str] = []
    for path in found:
        problem = _ask([path, "ps", "-q"], ASK_S)
        if problem is None:
            return path
        problems.append(f"{os.path.basename(path)} does not answer ({problem})")
    raise UnsupportedError(f"{'; '.join(problems)}: start its service, or {INSTALL}")


def _ask(argv: list[str], timeout_s: float, env: dict[str, str] | None = None) -> str | None:
    """None, or the last line of what went wrong."""
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, env=env, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:g} s"
    except OSError as error:
        return str(error)
    lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    return None if done.returncode == 0 else (lines or [f"exit code {done.returncode}"])[-1].strip()[:300]


def _environment(options: Options) -> dict[str, str]:
    """Podman hands proxies on into the container, and they may hold passwords."""
    return {k: v for k, v in os.environ.items() if options.network or not k.lower().endswith("_proxy")}


def _wait_until_up(watch: subprocess.Popen[bytes]) -> None:
    assert watch.stdout is not None and watch.stderr is not None
    if not select.select([watch.stdout], [], [], START_S)[0]:
        raise SandboxError(f"the container did not start within {START_S:g} s")
    if watch.stdout.readline() != b"up\n":
        said = watch.stderr.read(2000).decode(errors="replace").strip()
        raise SandboxError(f"the container did not start: {said}")


def _let_go(watch: subprocess.Popen[bytes]) -> None:
    assert watch.stdin is not None
    with contextlib.suppress(OSError):
        watch.stdin.close()


def _wait_until_gone(watch: subprocess.Popen[bytes]) -> None:
    assert watch.stdout is not None and watch.stderr is not None
    with contextlib.suppress(subprocess.TimeoutExpired):  # it goes on without us
        watch.wait(STOP_S)
        watch.stdout.close()
        watch.stderr.close()
