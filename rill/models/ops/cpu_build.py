"""Compiles cpu_kernels.cpp, once per machine, and loads it into torch's process.

The result lies in the user's cache folder under a name that hashes the source, its headers, the flags, and what the
compiler says of itself and of the processor, so a change of any of them builds again and nothing stale is ever loaded.
Sources use plain pointers and no library headers: a build takes seconds and fits every version of torch. OpenMP is
torch's own runtime, so both share one pool of threads.

Where there is no compiler, or it fails, the answer is None, with one warning in the log; callers then use torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from rill.models.packaged import cache_folder

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
# Reassociation lets the compiler vectorise sums; the order it picks is fixed when the library is built.
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fassociative-math",
    "-fno-signed-zeros", "-freciprocal-math",
)  # fmt: skip
BUILD_TIMEOUT_S = 300.0


def load_library() -> ctypes.CDLL | None:
    """The kernels, built if need be; None where they cannot be."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        logger.warning("no C++ compiler on the path: the CPU runs on torch operations, which is slower")
        return None
    try:
        return ctypes.CDLL(str(build(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        message = str(error)
        if isinstance(error, subprocess.CalledProcessError):
            message += error.stderr.decode(errors="replace")[-800:]
        logger.warning("%s could not be built, so torch operations are used: %s", SOURCE.name, message)
        return None


def build(compiler: str) -> Path:
    flags = [*FLAGS, _processor_flag()]
    # Its version and what the processor has, as macros: a home folder may be shared by different ones.
    macros = _run([compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull])
    parts = [path.read_bytes() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    identity = hashlib.sha256(b"".join(parts) + " ".join(flags).encode() + macros)
    file_name = f"{SOURCE.stem}-{identity.hexdigest()[:16]}.so"
    library = _cache_folder() / file_name
    if not library.exists():
        with tempfile.TemporaryDirectory(prefix=".build-", dir=library.parent) as scratch:
            object_file, built = Path(scratch) / "object.o", Path(scratch) / file_name
            # Two steps: linking with fast-math flags would change how the whole process rounds denormals.
            _run([compiler, *flags, "-c", str(SOURCE), "-o", str(object_file)])
            _run([compiler, "-shared", "-fopenmp", str(object_file), "-o", str(built)])
            built.replace(library)  # atomic: processes that start together may all build it
    return library


def _run(command: list[str]) -> bytes:
    return subprocess.run(command, capture_output=True, check=True, timeout=BUILD_TIMEOUT_S).stdout


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
