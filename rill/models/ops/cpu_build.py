"""Compiles C++ that lies beside this file, once per machine, and loads it into torch's process.

`load_library("cpu_kernels")` builds cpu_kernels.cpp; the result lies in the user's cache folder under a name that
hashes the source, its own headers, the compiler, the flags and the processor, so a change of any of them builds
again and nothing stale is ever loaded. Sources use plain pointers and no library headers: a build takes seconds and
fits every version of torch. OpenMP is torch's own runtime, so both share one pool of threads.

Where there is no compiler, or it fails, the answer is None, with one warning in the log; callers then use torch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from rill.models.packaged import cache_folder

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
# Reassociation lets the compiler vectorise sums; the order it picks is fixed when the library is built.
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fassociative-math",
    "-fno-signed-zeros", "-freciprocal-math",
)  # fmt: skip
BUILD_TIMEOUT_S = 300.0


@functools.cache
def load_library(name: str) -> ctypes.CDLL | None:
    """`name`.cpp of this folder as a library, built if need be; None where it cannot be."""
    compiler = _compiler()
    if compiler is None:
        return None
    try:
        return ctypes.CDLL(str(_build(compiler, name)))
    except (OSError, subprocess.SubprocessError) as error:
        message = str(error)
        if isinstance(error, subprocess.CalledProcessError):
            message += error.stderr.decode(errors="replace")[-800:]
        logger.warning("%s could not be built, so torch operations are used: %s", name, message)
        return None


@functools.cache
def _compiler() -> str | None:
    found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        logger.warning("no C++ compiler on the path: the CPU runs on torch operations, which is slower")
    return found


def _build(compiler: str, name: str) -> Path:
    flags = [*FLAGS, _processor_flag()]
    source = FOLDER / f"{name}.cpp"
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=True, timeout=BUILD_TIMEOUT_S
    )
    parts = [path.read_bytes() for path in _with_headers(source)]
    identity = hashlib.sha256(b"".join(parts) + version.stdout + " ".join(flags).encode() + _cpu_identity())
    file_name = f"{name}-{identity.hexdigest()[:16]}.so"
    library = _cache_folder() / file_name
    if not library.exists():
        with tempfile.TemporaryDirectory(prefix=".build-", dir=library.parent) as scratch:
            object_file, built = Path(scratch) / "object.o", Path(scratch) / file_name
            # Two steps: linking with fast-math flags would change how the whole process rounds denormals.
            for command in (
                [compiler, *flags, "-c", str(source), "-o", str(object_file)],
                [compiler, "-shared", "-fopenmp", str(object_file), "-o", str(built)],
            ):
                subprocess.run(command, capture_output=True, check=True, timeout=BUILD_TIMEOUT_S)
            built.replace(library)  # atomic: processes that start together may all build it
    return library


def _cache_folder() -> Path:
    """In the user's cache; where that cannot be written, in one of the user's own among the temporary files."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: no home is known at all
        pass
    folder = Path(tempfile.gettempdir()) / f"rill-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid == os.getuid() and not folder.is_symlink():
        return folder
    return Path(tempfile.mkdtemp(prefix="rill-"))  # somebody else took the name: never load what lies there


def _processor_flag() -> str:
    """Everything that this processor has. Sources ask the compiler's macros what that is, and leave out the rest."""
    return "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


def _with_headers(source: Path) -> list[Path]:
    """A source and every file beside it that it includes, at any depth."""
    found = [source]
    for path in found:  # grows while it is read
        for name in re.findall(r'^#include "(.+)"', path.read_text(encoding="utf-8"), re.MULTILINE):
            if FOLDER / name not in found:
                found.append(FOLDER / name)
    return found


def _cpu_identity() -> bytes:
    """-march=native depends on the processor, and a home folder may be shared by different ones."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor().encode()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    ).encode()
