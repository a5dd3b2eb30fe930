"""`rill doctor`: is this machine ready, and if not, what to do about it; `rill doctor RUN`: what is wrong with a run.

Looks at the machine as a run would find it: interpreter, libraries, devices, memory, limits, optional libraries.
Optional libraries are looked up, not imported, because some take many seconds.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from rill.cli.arguments import RUNS, AsJson, Root
from rill.cli.console import say, say_json, say_table
from rill.errors import UnsupportedError
from rill.telemetry.run import Run

_GIB = 1 << 30

EXTRAS: dict[str, tuple[str, str, str]] = {
    "ray": ("ray", "ray", "clusters of several machines"),
    "vllm": ("vllm", "vllm", "the vLLM rollout engine"),
    "peft": ("peft", "lora", "LoRA training"),
    "math_verify": ("math-verify", "math", "rewards that compare mathematical answers"),
    "reasoning_gym": ("reasoning-gym", "tasks", "generated reasoning tasks"),
    "pyarrow": ("pyarrow", "data", "parquet files"),
    "datasets": ("datasets", "data", "Hugging Face dataset folders"),
    "zstandard": ("zstandard", "zstd", "smaller weight differences"),
    "mcp": ("mcp", "envs", "MCP servers as tools"),
    "tensorboard": ("tensorboard", "trackers", "the TensorBoard sink"),
    "wandb": ("wandb", "trackers", "the Weights & Biases sink"),
    "trackio": ("trackio", "trackers", "the trackio sink"),
}
"""module -> (package, rill's extra, what it is for)"""

app = typer.Typer(rich_markup_mode=None, add_completion=False)


class State(StrEnum):
    OK = "ok"
    ABSENT = "absent"  # optional, and not there
    WARNING = "warning"
    BROKEN = "broken"


class Finding(NamedTuple):
    """One line of the report."""

    what: str
    state: State
    found: str
    advice: str = ""


def told(what: str, found: str, advice: str = "", state: State = State.WARNING) -> Finding:
    """Well where there is nothing to do about it."""
    return Finding(what, state if advice else State.OK, found, advice)


_STYLES = {
    State.OK.value: "green",
    State.ABSENT.value: "dim",
    State.WARNING.value: "yellow",
    State.BROKEN.value: "red",
}


@app.command()
def doctor(
    run: Annotated[str, typer.Argument(help="A run's name or folder: say what is wrong with it.")] = "",
    root: Root = RUNS,
    as_json: AsJson = False,
) -> None:
    """Say what is installed, which devices there are, which optional parts work, and what to do about each.

    With RUN, whether it runs or has ended: what is wrong with it, since when, and what to try. Ends with exit code 1
    when something that every run needs, or the run, is broken.

    \b
    Examples:
      rill doctor
      rill doctor demo        what is wrong with the run runs/demo
      rill doctor --json
    """
    if run:
        _doctor_run(Run.open(run, root=root), as_json)
        return
    findings = list(examine())
    if as_json:
        say_json([finding._asdict() for finding in findings])
    else:
        rows = [[f.what, f.state.value, f.found, f.advice] for f in findings]
        say_table(["what", "state", "found", "what to do"], rows, styles=_STYLES)
        say(_verdict(findings))
    if any(finding.state is State.BROKEN for finding in findings):
        raise typer.Exit(1)


def _doctor_run(run: Run, as_json: bool) -> None:
    from rill.journal.checkpoints import step_of, whole_checkpoints
    from rill.journal.diagnosis import Severity, diagnose
    from rill.telemetry.metrics import read_metrics

    found = diagnose(run)
    if as_json:
        say_json([{**each._asdict(), "severity": each.severity.name.lower()} for each in found])
    else:
        steps = [row.step for row in read_metrics(run.path)] or [*map(step_of, whole_checkpoints(run))]
        where = f", after step {steps[-1]}" if steps else ", before its first step"
        say(f"{run.path}: {run.state().status.value}{where}")
        for each in found:
            color = {Severity.BROKEN: "red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}[each.severity]
            since = f" (since {each.since})" if each.since else ""
            say(f"{typer.style(each.severity.name.lower(), fg=color)}: {each.what}{since}")
            say(f"    try: {each.advice}")
        if not found:
            say("nothing is wrong that its files would tell")
    if any(each.severity is Severity.BROKEN for each in found):
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """Everything the report says, in its order."""
    yield _python()
    yield from _libraries()
    yield from _devices()
    yield _memory()
    yield _shared_memory(Path("/dev/shm"))
    yield _open_files()
    yield _disk(Path.cwd())
    yield _compiler()
    yield _headers()
    yield _sandbox()
    yield _containers()
    for module in EXTRAS:
        yield _extra(module)


def _python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    advice = "runs need Linux (a container or a virtual machine will do); looking at runs works here"
    return told("python", found, "" if sys.platform == "linux" else advice)


def _libraries() -> Iterator[Finding]:
    """What rill itself requires, from its own package metadata."""
    try:
        required = metadata.requires("rill") or []
    except metadata.PackageNotFoundError:
        yield told("rill", "not installed", "pip install -e . in the checkout", State.BROKEN)
        return
    yield told("rill", metadata.version("rill"))
    for requirement in required:
        if "extra ==" in requirement:
            continue
        name = requirement.split(";")[0].strip().rstrip("0123456789.,<>=!~ ")
        try:
            yield told(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield told(name, "not installed", f'pip install "{requirement}"', State.BROKEN)


def _devices() -> Iterator[Finding]:
    yield told("cpu", f"{_num_cores()} cores")
    try:
        import torch
    except (ImportError, OSError) as error:
        advice = "reinstall torch: pip install --force-reinstall torch"
        yield told("torch", str(error).splitlines()[0], advice, State.BROKEN)
        return
    if not torch.cuda.is_available():
        has_driver = Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None
        yield _no_cuda(has_driver=has_driver, has_cuda_build=torch.version.cuda is not None)
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield told(f"cuda:{index}", f"{properties.name}, {properties.total_memory / _GIB:.0f} GiB")


def _num_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _no_cuda(*, has_driver: bool, has_cuda_build: bool) -> Finding:
    if not has_driver:
        return told("cuda", "no NVIDIA driver", "small models train on the CPU", State.ABSENT)
    if has_cuda_build:
        advice = "torch is built for CUDA but sees no device: check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
        return told("cuda", "no device", advice)
    advice = "this torch is built for CPUs: install a CUDA build of it to use the GPU"
    return told("cuda", "a driver, but no CUDA in torch", advice)


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    found = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free"
    return told("memory", found, "the demo needs about 2 GiB" if memory.available < 2 * _GIB else "")


def _shared_memory(folder: Path) -> Finding:
    """Tensors pass between processes of one machine through it."""
    free_bytes = shutil.disk_usage(folder).free if folder.is_dir() else 0
    advice = "tensors travel through it: in Docker, run with --shm-size=8g or --ipc=host"
    return told(
        "shared memory", f"{free_bytes / _GIB:.1f} GiB free in {folder}", advice if free_bytes < _GIB else ""
    )


def _open_files() -> Finding:
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = f"large clusters open many sockets: ulimit -n {min(hard_limit, 65536)}"
    return told("open files", f"at most {limit}", advice if limit < min(4096, hard_limit) else "")


def _disk(folder: Path) -> Finding:
    free_bytes = shutil.disk_usage(folder).free
    found = f"{free_bytes / _GIB:.0f} GiB free here"
    return told("disk", found, "checkpoints may not fit" if free_bytes < 5 * _GIB else "")


def _compiler() -> Finding:
    """The kernels of models on the CPU are compiled on first use and kept."""
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if found is not None:
        return told("compiler", found)
    line = install_line(apt="g++", dnf="gcc-c++", pacman="gcc", apk="g++", brew="gcc")
    advice = f"on the CPU models run through plain torch, slower; for rill's kernels: {line}"
    return told("compiler", "no C++ compiler on PATH", advice)


def _headers() -> Finding:
    """Triton compiles a small C file against them when a GPU is first used."""
    folder = sysconfig.get_paths()["include"]
    if (Path(folder) / "Python.h").is_file():
        return told("python headers", folder)
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    line = install_line(
        apt=f"{python}-dev", dnf=f"{python}-devel", pacman="python", apk="python3-dev", brew="python"
    )
    return told("python headers", f"no {folder}/Python.h", f"Triton's kernels on a GPU need them: {line}")


def install_line(**packages: str) -> str:
    """What to type on this machine, by package manager: install_line(apt="g++", dnf="gcc-c++")."""
    verbs = {"pacman": "pacman -S", "apk": "apk add"}
    for manager, package in packages.items():
        if shutil.which("apt-get" if manager == "apt" else manager):
            sudo = "" if manager == "brew" or os.geteuid() == 0 else "sudo "
            return f"{sudo}{verbs.get(manager, f'{manager} install')} {package}"
    return f"install {next(iter(packages.values()))}"


def _sandbox() -> Finding:
    """What keeps programs of the code reward and of tools away from this machine."""
    from rill.envs.sandbox import missing

    problem = missing()
    if problem is None:
        return told("sandbox", "bubblewrap")
    if shutil.which("bwrap") is None:
        problem = install_line(**dict.fromkeys(("apt", "dnf", "pacman", "apk"), "bubblewrap"))
    return told("sandbox", "none", f"code rewards and sandboxed tools refuse to run here: {problem}")


def _containers() -> Finding:
    """The other sandbox: wanted only where an image is."""
    from rill.envs.sandbox.container import find_cli

    try:
        return told("containers", os.path.basename(find_cli()))
    except UnsupportedError as error:
        return told("containers", "none", f'sandbox = "container": {error}', State.ABSENT)


def _extra(module: str) -> Finding:
    package, extra, purpose = EXTRAS[module]
    if importlib.util.find_spec(module) is None:
        advice = f'for {purpose}: pip install "rill[{extra}]"'
        return told(package, "not installed", advice, State.ABSENT)
    try:
        return told(package, metadata.version(package))
    except metadata.PackageNotFoundError:
        return told(package, "unknown version")


def _verdict(findings: list[Finding]) -> str:
    broken = [finding.what for finding in findings if finding.state is State.BROKEN]
    if broken:
        return f"not ready: fix {', '.join(broken)} first"
    warnings = [finding.what for finding in findings if finding.state is State.WARNING]
    return f"ready, but look at {', '.join(warnings)}" if warnings else "ready"
