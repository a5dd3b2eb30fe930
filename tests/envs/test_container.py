"""Sandboxes made of containers: by a docker that only plays its part, and by podman where this machine has it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rill.envs.rewards.code import CodeReward
from rill.envs.sandbox import Limits, SandboxPool, container, guest, missing, open_sandbox
from rill.errors import ConfigError, UnsupportedError
from rill.types import Prompt
from tests.envs.test_runner import answered

FAKE = """#!{python} -IS
# Plays docker: notes what it is told, and runs commands as plain processes of this machine.
import json, os, signal, sys, time
home, words = {home!r}, sys.argv[1:]
def has(flag): return os.path.exists(os.path.join(home, flag))
def fail(text): sys.exit(text)
with open(os.path.join(home, "log"), "a") as log:
    log.write(json.dumps([words, os.environ.get("HTTPS_PROXY", "")]) + "\\n")
if words[0] == "ps" and has("silent"):
    fail("Cannot connect to the Docker daemon. Is it running?")
elif words[:2] == ["image", "inspect"] and words[2] != "box":
    fail("No such image: " + words[2])
elif words[0] == "pull":
    fail("Trying to pull\\nError: connection refused")
elif words[0] == "run":
    if "runsc" in words and not has("gvisor"):
        fail("unknown or invalid runtime name: runsc")
    if "-d" in words:
        time.sleep(0.5 if has("slow") else 0)
        os.mkdir(os.path.join(home, words[words.index("--name") + 1]))
    elif has("old"):
        fail("rill needs Python 3.10 in it, not 3.8")
elif words[0] == "exec":
    os.chdir(os.path.join(home, words[2]))
    with open("pid", "w") as file:
        file.write(str(os.getpid()))
    os.execv(sys.executable, [sys.executable, *words[4:]])
elif words[0] == "rm":
    place = os.path.join(home, words[2])
    if os.path.exists(place + "/pid"):
        try:
            os.kill(int(open(place + "/pid").read()), signal.SIGKILL)
        except ProcessLookupError:
            pass
    if os.path.exists(place):
        os.rename(place, os.path.join(home, "gone-" + words[2]))
"""


class Docker:
    def __init__(self, home: Path, name: str = "docker") -> None:
        self.home = home
        home.mkdir()
        (home / "bin").mkdir()
        self.program = home / "bin" / name
        self.program.write_text(FAKE.format(python=sys.executable, home=str(home)))
        self.program.chmod(0o755)

    def calls(self, *first: str) -> list[list[str]]:
        log = self.home / "log"
        said = [json.loads(line)[0] for line in log.read_text().splitlines()] if log.exists() else []
        return [words for words in said if words[: len(first)] == list(first)]

    def containers(self) -> list[str]:
        return [path.name for path in self.home.glob("rill-*")]


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Docker]:
    container._prepared.cache_clear()
    fake = Docker(tmp_path / "docker")
    monkeypatch.setenv("PATH", f"{fake.home / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(container, "CLIS", ("docker",))
    yield fake
    container._prepared.cache_clear()


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.05)


async def test_one_container_serves_a_session_and_goes_with_it(docker: Docker) -> None:
    session = await open_sandbox("container", image="box")
    await session.write("src/data", b"3 4\n")
    done = await session.exec(["sh", "-c", "cat src/data; echo oops >&2; exit 3"])
    assert (done.exit_code, done.stdout, done.stderr, done.ended) == (3, b"3 4\n", b"oops\n", "error")
    assert (await session.python("print(int(input()) + 1)", stdin=b"5")).stdout == b"6\n"
    assert (await session.python("while True: pass", timeout_s=0.2)).ended == "timeout"
    assert (await session.exec(["yes"])).ended == "output"
    assert await session.read("src/data") == b"3 4\n"
    assert len(docker.containers()) == len(docker.calls("exec")) == 1
    await session.close()
    await session.close()
    assert docker.containers() == [] and len(docker.calls("rm", "-f")) == 1


async def test_every_fence_stands_in_the_line_that_starts_the_container(
    docker: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://me:sesame@proxy")
    limits = Limits(memory_bytes=2**29, disk_bytes=2**20, num_processes=8, num_files=32)
    session = await open_sandbox("container", limits, image="box")
    await session.close()
    log = [line for line in (docker.home / "log").read_text().splitlines() if line.startswith('[["run"')]
    assert len(log) == 2 and "sesame" not in "".join(log), "podman would hand it on"
    probe, line = docker.calls("run")
    assert line[:3] == ["run", "-d", "--rm"] and probe[:2] == ["run", "--rm"]
    assert line[line.index("box") + 1 :][-1].endswith("time.sleep(86400)"), "it ends by itself in the end"
    said = " ".join(line)
    for words in (
        "--network none", "--read-only", "--user 65534:65534", "--cap-drop ALL", "--security-opt no-new-privileges",
        f"--memory {2**29 + 2**21} --memory-swap {2**29 + 2**21}", "--pids-limit 12", "--ulimit nofile=32:32",
        "--tmpfs /sandbox:rw,exec,nosuid,nodev,mode=1777,size=1048576", "--entrypoint python3 box -I -S",
    ):  # fmt: skip
        assert words in said and words in " ".join(probe), words
    assert "--runtime" not in said and "sesame" not in said


async def test_gvisor_the_network_and_a_root_of_its_own_are_given_where_asked_for(docker: Docker) -> None:
    (docker.home / "gvisor").touch()
    wishes = {"runtime": "runsc", "network": True, "user": "root", "read_only": False, "life_s": 60}
    session = await open_sandbox("container", image="box", **wishes)
    await session.close()
    said = " ".join(docker.calls("run")[1])
    assert "--runtime runsc" in said and "--user root" in said and "time.sleep(60)" in said
    assert "--pids-limit 272" in said, "gVisor's own tasks are counted too"
    assert "--network" not in said and "--read-only" not in said


@pytest.mark.parametrize(
    ("state", "options", "words"),
    [
        ("silent", {"image": "box"}, r"docker does not answer \(Cannot connect.*start its service.*podman"),
        ("", {"image": "box", "cli": "nerdctl"}, r"need nerdctl, which is not here: .*apt install podman"),
        ("", {"image": ""}, r"needs an image"),
        (
            "",
            {"image": "other"},
            r"image other is not here and cannot be pulled \(Error: connection refused\)",
        ),
        ("", {"image": "box", "runtime": "runsc"}, r"runtime runsc does not start \(unknown.*install gVisor"),
        ("old", {"image": "box"}, r"a container of box does not start \(rill needs Python 3.10"),
    ],
    ids=["no daemon", "no program", "no image", "image not here", "no gVisor", "old Python"],
)
async def test_what_cannot_be_had_is_refused_in_one_line_before_anything_starts(
    docker: Docker, state: str, options: dict[str, Any], words: str
) -> None:
    if state:
        (docker.home / state).touch()
    with pytest.raises(UnsupportedError, match=words) as raised:
        await open_sandbox("container", **options)
    problem = missing("container", **options)
    assert problem == str(raised.value) and "\n" not in problem
    assert docker.calls("run", "-d") == [], "nothing was started"


async def test_podman_serves_where_docker_does_not_answer(
    docker: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (docker.home / "silent").touch()
    podman = Docker(tmp_path / "podman", "podman")
    monkeypatch.setenv("PATH", f"{docker.home / 'bin'}:{podman.home / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(container, "CLIS", ("docker", "podman"))
    session = await open_sandbox("container", image="box")
    await session.close()
    assert docker.calls("run") == [] and len(podman.calls("run", "-d")) == 1


OWNER = """
import asyncio, os, signal, sys
from rill.envs.sandbox import open_sandbox
async def main():
    session = await open_sandbox("container", image=sys.argv[1])
    print("open", flush=True)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["killed", "forgetful"])
async def test_a_container_goes_when_its_owner_dies(docker: Docker, how: str) -> None:
    owner = [sys.executable, "-c", OWNER, "box", how]
    done = await asyncio.to_thread(subprocess.run, owner, capture_output=True, timeout=120, check=False)
    assert done.stdout == b"open\n" and done.returncode == (-signal.SIGKILL if how == "killed" else 0)
    await until(lambda: docker.containers() == [] and len(docker.calls("rm")) == 1)


async def test_a_start_that_is_given_up_leaves_no_container(docker: Docker) -> None:
    (docker.home / "slow").touch()
    opening = asyncio.ensure_future(open_sandbox("container", image="box"))
    await until(lambda: bool(docker.calls("run", "-d")))
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await until(lambda: len(docker.calls("rm")) == 1 and docker.containers() == [])


async def test_a_pool_of_containers_gives_every_owner_its_own(docker: Docker) -> None:
    pool = SandboxPool("container", num_warm=0, image="box")
    async with pool.session() as one, pool.session() as other:
        await one.write("secret", b"1")
        with pytest.raises(OSError, match="FileNotFoundError"):
            await other.read("secret")
    await pool.close()
    assert docker.containers() == [] and len(docker.calls("run", "-d")) == 2


async def test_the_code_reward_judges_in_containers(docker: Docker) -> None:
    with pytest.raises(ConfigError, match='set sandbox = "container"'):
        CodeReward(CodeReward.Config(image="box"))
    with pytest.raises(UnsupportedError, match="reward `code`: .*runsc"):
        CodeReward(CodeReward.Config(sandbox="container", image="box", runtime="runsc"))
    reward = CodeReward(CodeReward.Config(sandbox="container", image="box"))
    task = Prompt(id="p", text="q", metadata={"tests": ["assert add(1, 2) == 3"]})
    try:
        for code, score in (("def add(a, b): return a + b", 1.0), ("def add(a, b): return 4", 0.0)):
            assert await reward.score(task, code, answered(code)) == score
    finally:
        await reward._pool.close()
        await reward._checkers.close()
    await until(lambda: docker.containers() == [])


async def test_sandboxes_that_are_killed_while_they_are_idle_cost_no_score(docker: Docker) -> None:
    """Those that the pool keeps warm, and the checker's."""
    reward = CodeReward(CodeReward.Config(sandbox="container", image="box"))
    task = Prompt(id="p", text="q", metadata={"tests": ["assert add(1, 2) == 3"]})
    code = "def add(a, b): return a + b"
    try:
        assert await reward.score(task, code, answered(code)) == 1.0
        shelf = reward._pool._loops()
        await until(lambda: len(shelf.ready) > 0 and not shelf.starting)
        idle = [*shelf.ready, *reward._checkers._idle()]
        for pid in docker.home.glob("rill-*/pid"):
            os.kill(int(pid.read_text()), signal.SIGKILL)
        await until(lambda: all(sandbox.has_ended for sandbox in idle))
        assert await reward.score(task, code, answered(code)) == 1.0
    finally:
        await reward._pool.close()
        await reward._checkers.close()
    await until(lambda: docker.containers() == [])


def test_a_kernel_without_pidfd_serves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """gVisor's was long without."""

    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    session = guest.Session(None, {})  # type: ignore[arg-type]
    for script, timeout_s, ended in (
        ("exit 0", 30.0, "ok"),
        ("exit 4", 30.0, "error"),
        ("sleep 60", 0.1, "timeout"),
    ):
        request = {"op": "exec", "argv": ["sh", "-c", script], "timeout_s": timeout_s, "output_bytes": 1000}
        assert session.answer(request)["ended"] == ended


# --- podman, for real --------------------------------------------------------------------------------------


def pack_python(target: Path) -> None:
    """A root file system: this Python with the libraries it needs, and a shell."""
    python, library = os.path.realpath(sys.executable), sysconfig.get_path("stdlib")
    modules = [str(path) for path in Path(library, "lib-dynload").glob("*.so")]
    programs = [python, os.path.realpath("/bin/sh"), *modules]
    linked = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    unneeded = {"test", "site-packages", "idlelib", "ensurepip", "tkinter", "lib2to3", "turtledemo"}

    def needed(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        parts = set(entry.name.split("/"))
        return None if parts & unneeded or any(part.startswith("config-") for part in parts) else entry

    with tarfile.open(target, "w") as tar:
        tar.add(library, filter=needed)
        for path in sorted({python, "/bin/sh", *re.findall(r"(/\S+) \(0x", linked)}):
            tar.add(os.path.realpath(path), path)
        link = tarfile.TarInfo("usr/local/bin/python3")
        link.type, link.linkname = tarfile.SYMTYPE, python
        tar.addfile(link)


@pytest.fixture
def image(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """In a store of its own; its sockets want a short path."""
    if shutil.which("podman") is None:
        pytest.skip("no podman here: apt install podman")
    folder = tempfile.TemporaryDirectory(prefix="rill-", ignore_cleanup_errors=True)
    place = Path(folder.name)
    runtime = next((name for name in ("runc", "crun") if shutil.which(name)), "")
    engine = {"cgroup_manager": "cgroupfs", "events_logger": "file", "tmp_dir": str(place / "engine")}
    engine |= {"runtime": runtime} if runtime else {}
    lines = "\n".join(f'{key} = "{value}"' for key, value in engine.items())
    (place / "containers.conf").write_text(f"[engine]\n{lines}\n")
    places = f'graphroot = "{place / "store"}"\nrunroot = "{place / "run"}"'
    (place / "storage.conf").write_text(f'[storage]\ndriver = "overlay"\n{places}\n')
    monkeypatch.setenv("CONTAINERS_CONF", str(place / "containers.conf"))
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(place / "storage.conf"))
    monkeypatch.setattr(container, "CLIS", ("podman",))
    pack_python(place / "root.tar")
    made = subprocess.run(
        ["podman", "import", str(place / "root.tar"), "localhost/rill-test"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if made.returncode != 0:
        pytest.skip(f"podman cannot make an image here: {made.stderr.strip()[-200:]}")
    problem = missing("container", image="localhost/rill-test")
    if problem is not None:
        pytest.skip(f"podman cannot start containers here: {problem}")
    yield "localhost/rill-test"
    for line in (["podman", "rmi", "-af"], ["umount", str(place / "store" / "overlay")]):
        subprocess.run(line, capture_output=True, timeout=300, check=False)
    container._prepared.cache_clear()
    folder.cleanup()


def running() -> str:
    listed = subprocess.run(["podman", "ps", "-aq"], capture_output=True, text=True, timeout=60, check=True)
    return listed.stdout


@pytest.mark.slow
async def test_podman_holds_hostile_programs(image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "sesame")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:sesame@proxy")
    limits = Limits(
        exec_s=30.0, memory_bytes=2**29, disk_bytes=4 * 2**20, file_bytes=2**20, output_bytes=10_000
    )
    session = await open_sandbox("container", limits, image=image)

    async def said(code: str) -> str:
        return (await session.python(code)).text

    await session.write("a/b", b"1")
    done = await session.exec(["sh", "-c", 'read line < a/b; echo "$line"; exit 3'])
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"1\n", b"")
    assert await session.read("a/b") == b"1"
    assert "sesame" not in await said("import os; print(os.environ)")
    assert "65534" in await said("import os; print(os.getuid())")
    assert "Read-only" in await said("open('/usr/mark', 'w')") or "denied" in await said(
        "open('/usr/mark', 'w')"
    )
    assert "No such file" in await said(f"open({__file__!r})")
    assert "unreachable" in await said("import socket; socket.create_connection(('8.8.8.8', 53), 2)")
    assert "MemoryError" in await said("bytearray(2**31)")
    assert "No space left" in await said("for i in range(99): open(f'/tmp/{i}', 'wb').write(bytes(2**19))")
    assert "File too large" in await said("open('big', 'wb').write(bytes(2**22))")
    assert "Too many open" in await said("f = [open('/dev/null') for _ in range(100)]")
    forks = "import os, time\nfor _ in range(200):\n    if os.fork() == 0: time.sleep(9)"
    assert "temporarily unavailable" in await said(forks)
    assert (await session.python("while True: pass", timeout_s=0.3)).ended == "timeout"
    assert (await session.python("while True: print('x' * 99)")).ended == "output"
    detached = "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\ntime.sleep(600)"
    await session.python(detached, timeout_s=5)
    await session.close()
    assert running() == ""


@pytest.mark.slow
async def test_podmans_container_goes_when_its_owner_is_killed(image: str) -> None:
    owner = [sys.executable, "-c", OWNER, image, "killed"]
    done = await asyncio.to_thread(subprocess.run, owner, capture_output=True, timeout=120, check=False)
    assert done.stdout == b"open\n", done.stderr
    await until(lambda: running() == "")
