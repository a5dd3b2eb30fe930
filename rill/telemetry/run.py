"""The run folder: one place on disk for everything a run leaves behind.

    runs/<name>/
      config.toml        the resolved configuration, every value with where it came from
      environment.json   versions, machine, git commit and command line of each start
      status.json        running | finished | failed | interrupted, and since when
      metrics.jsonl      figures by step              (rill.telemetry.metrics)
      trace/             spans, one file a process    (rill.telemetry.trace)
      rollouts/          what the model said, one file a rollout worker
      checkpoints/       what a resume starts from
      log.txt            what the run said

The driver of a run owns its Run and holds its lock; everybody else reads the files. Creating never overwrites: a
taken name gets a number. Status and environment are replaced atomically, so a reader never sees half of one.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from rill.errors import UserError
from rill.registry import unknown_name_message
from rill.telemetry.metrics import METRICS_FILE

RUNS_FOLDER = "runs"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LIBRARIES = ("torch", "transformers", "numpy", "ray", "vllm", "peft", "verifiers")


VANISHED = "its process ended without saying why"
LOOK_S = 1.0
"""How long those who look at a run may keep its lock from whoever wants to run it."""


class RunStatus(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"  # by Ctrl-C, or its process is gone
    UNKNOWN = "unknown"  # status.json is damaged, or of a version of rill with other words


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What status.json holds."""

    status: RunStatus
    message: str = ""
    """Why, when it failed."""
    created_s: float
    """Seconds since the epoch."""
    changed_s: float
    pid: int
    host: str

    def lasted_s(self, last_figure_s: float) -> float:
        """From the start until now, until it ended, or, where its process is gone, until its last figures."""
        is_running = self.status is RunStatus.RUNNING
        return (time.time() if is_running else max(self.changed_s, last_figure_s)) - self.created_s


class Run:
    """One run folder. `create` and `resume` take its lock; `open` only reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd = -1

    @classmethod
    def create(
        cls,
        name: str,
        *,
        root: Path | str = RUNS_FOLDER,
        config_toml: str = "",
        argv: Sequence[str] | None = None,
    ) -> Run:
        """A new folder `root/name`, or `root/name-2` and so on where that exists. Its status is running."""
        if not _NAME.fullmatch(name):
            raise UserError(
                f"run name {name!r}: use letters, digits, '.', '_' and '-', starting with a letter or digit"
            )
        run = cls(_make_draft(Path(root), name))
        try:
            run._take_lock()
            run.checkpoints_dir.mkdir()
            run.trace_dir.mkdir()
            run.config_path.write_text(config_toml, encoding="utf-8")
            run._save_state(RunStatus.RUNNING, created_s=time.time())
            run.path = _renamed(run.path, name)
        except BaseException:
            run.remove()
            raise
        run._add_start(argv)
        return run

    @classmethod
    def resume(cls, run: Path | str, *, root: Path | str = RUNS_FOLDER) -> Run:
        """An existing folder, to go on in. Fails while another process is running it."""
        opened = cls.open(run, root=root)
        opened._take_lock()
        opened.set_status(RunStatus.RUNNING)
        opened._add_start()
        return opened

    @classmethod
    def open(cls, run: Path | str, *, root: Path | str = RUNS_FOLDER) -> Run:
        """An existing folder, by name under `root` or by path, for reading."""
        if (found := cls.find(run, root=root)) is not None:
            return found
        names = [found.name for found in list_runs(root)]
        if not names:
            raise UserError(
                f"there is no run {str(run)!r}, and none at all in {Path(root)}/: name a folder, or start one"
            )
        raise UserError(f"{unknown_name_message('run', str(run), names)} (in {Path(root)}/)")

    @classmethod
    def find(cls, run: Path | str, *, root: Path | str = RUNS_FOLDER) -> Run | None:
        """The same; None where there is none."""
        places = (Path(root) / run, Path(run))
        return next((cls(path) for path in places if (path / "status.json").is_file()), None)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def created_s(self) -> float:
        """Seconds since the epoch."""
        return self._saved_state().created_s

    @property
    def id(self) -> str:
        """The run's alone, whatever others are called, and the same for all its life: its name and its first start."""
        created = hashlib.sha256(repr(self.created_s).encode()).hexdigest()[:8]
        return f"{self.name}-{created}"

    @property
    def config_path(self) -> Path:
        return self.path / "config.toml"

    @property
    def environment_path(self) -> Path:
        return self.path / "environment.json"

    @property
    def status_path(self) -> Path:
        return self.path / "status.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / METRICS_FILE

    @property
    def trace_dir(self) -> Path:
        return self.path / "trace"

    @property
    def rollouts_dir(self) -> Path:
        return self.path / "rollouts"

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    def trained_model(self) -> Path:
        """The folder of the model that the run left."""
        folder = self.path / "model"
        if not folder.is_dir():
            raise UserError(
                f"run {self.name} has left no model yet: it exports one when it ends. One of a checkpoint: "
                f"rill runs export {self.path} -o FOLDER"
            )
        return folder

    @property
    def log_path(self) -> Path:
        return self.path / "log.txt"

    @property
    def resume_command(self) -> str:
        """What a user types to go on with this run."""
        return f"rill train --resume {self.path}"

    def state(self) -> RunState:
        """As saved, except that a running run whose process is gone was interrupted."""
        state = self._saved_state()
        # Locks are not reliably seen from other machines; there the saved status has to be believed.
        is_here = state.host == socket.gethostname()
        if state.status is RunStatus.RUNNING and is_here and not self._is_held():
            return replace(state, status=RunStatus.INTERRUPTED, message=VANISHED)
        return state

    def starts(self) -> list[dict[str, Any]]:
        """What each start of the run ran on; empty where that is lost."""
        try:
            found = json.loads(self.environment_path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return []
        return [start for start in found if isinstance(start, dict)] if isinstance(found, list) else []

    def set_status(self, status: RunStatus, message: str = "") -> None:
        self._save_state(status, message, created_s=self.created_s)

    @contextmanager
    def running(self) -> Iterator[Run]:
        """Around the run's work: sets how it ended."""
        try:
            yield self
        except KeyboardInterrupt:
            with suppress(OSError):
                self.set_status(RunStatus.INTERRUPTED, "stopped by Ctrl-C or SIGTERM")
            raise
        except BaseException as error:
            with suppress(OSError):  # on a full disk what ended the run is to be told, not this
                self.set_status(RunStatus.FAILED, f"{type(error).__name__}: {error}")
            raise
        else:
            self.set_status(RunStatus.FINISHED)
        finally:
            self.close()

    def remove(self) -> None:
        """Delete the folder of a run that has recorded nothing."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _take_lock(self) -> None:
        fd = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._wait_for_lock(fd)
        except BaseException:
            os.close(fd)
            raise
        self._lock_fd = fd

    def _wait_for_lock(self, fd: int) -> None:
        """Whoever looks at the run (`_is_held`) holds its lock too, shared and for a moment."""
        deadline_s = time.monotonic() + LOOK_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    holder = self._saved_state()
                    raise UserError(
                        f"{self.path} is being run by process {holder.pid} on {holder.host}: stop it first"
                    ) from None
            except OSError as error:
                raise UserError(
                    f"{self.path} cannot be locked ({error.strerror}), so two processes could run it at once: keep "
                    "runs where the file system has locks (--root FOLDER)"
                ) from error
            time.sleep(0.01)

    def _is_held(self) -> bool:
        """Whether some process, this one included, holds the run's lock; also where that cannot be told."""
        if self._lock_fd >= 0:
            return True
        try:
            fd = os.open(self.path / ".lock", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False

    def _saved_state(self) -> RunState:
        """What status.json says. A damaged one must not hide the run, whose checkpoints and figures may be whole."""
        try:
            return msgspec.json.decode(self.status_path.read_bytes(), type=RunState)
        except ValueError as error:  # msgspec's are
            written_s = self.status_path.stat().st_mtime
            return RunState(
                status=RunStatus.UNKNOWN,
                message=f"(status.json cannot be read: {error})",
                created_s=written_s,
                changed_s=written_s,
                pid=0,
                host="an unknown host",
            )

    def _save_state(self, status: RunStatus, message: str = "", *, created_s: float) -> None:
        state = RunState(
            status=status,
            message=message,
            created_s=created_s,
            changed_s=time.time(),
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        write_atomically(self.status_path, json.dumps(asdict(state), indent=2) + "\n")

    def _add_start(self, argv: Sequence[str] | None = None) -> None:
        """The environment file is a list: one entry for every time the run was started."""
        starts = [*self.starts(), describe_environment(argv or sys.argv)]
        write_atomically(self.environment_path, json.dumps(starts, indent=2) + "\n")


def list_runs(root: Path | str = RUNS_FOLDER) -> list[Run]:
    """Every run folder under `root`, oldest first."""
    folders = [path.parent for path in Path(root).glob("[!.]*/status.json")]
    runs = [Run(folder) for folder in folders]
    return sorted(runs, key=lambda run: (run.created_s, run.name))


def describe_environment(argv: Sequence[str]) -> dict[str, Any]:
    """Everything outside the configuration that a result may depend on."""
    from rill import __version__

    return {
        "time_s": time.time(),
        "command": list(argv),
        "directory": os.getcwd(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "num_cpus": os.cpu_count(),
        "versions": {"rill": __version__} | {name: v for name in _LIBRARIES if (v := _version(name))},
        "git": _git_commit(),
    }


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the old content or the new, never a part, whatever happens to this process."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)  # on a full disk it would be in the way of what is tried next
        raise


def sync(path: Path) -> None:
    """A file or a folder, to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _make_draft(root: Path, name: str) -> Path:
    """A folder that is no run yet: half of one under the name would be in the way of `--resume auto` for ever."""
    path = root / f".{name}.{os.getpid()}.{time.time_ns():x}"
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"no runs can be kept in {root}: {error.strerror}: name another folder") from error
    return path


def _renamed(draft: Path, name: str) -> Path:
    """The draft under its name, or the first number of it that is free."""
    for number in itertools.count(1):
        path = draft.with_name(name if number == 1 else f"{name}-{number}")
        try:
            return draft.rename(path)  # atomic: of two processes with one name only one succeeds
        except OSError:
            if not path.exists():
                raise
    raise AssertionError("numbers do not end")


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> dict[str, Any] | None:
    """The commit of the working directory and whether it has changes; None outside a repository."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "has_changes": bool(_git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
