"""`rill serve` as a process of its own, for tests that need one: started, found by the address it prints, ended."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

START_TIMEOUT_S = 300.0


@contextmanager
def rill_serve(
    folder: Path, *settings: str, environment: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(process, base address without /v1). The address is the line that a person would read."""
    command = [
        sys.executable,
        "-m",
        "rill.cli.main",
        "serve",
        str(folder),
        "--port",
        "0",
        "engine.device=cpu",
    ]
    process = subprocess.Popen(
        [*command, *settings],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
        stdout=subprocess.PIPE,
        text=True,
    )
    kill_late = threading.Timer(START_TIMEOUT_S, process.kill)
    kill_late.start()
    try:
        address = _address(process)
        kill_late.cancel()
        yield process, address
    finally:
        kill_late.cancel()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    said: Sequence[str] = []
    for line in process.stdout:
        if " at http://" in line:
            return line.split(" at ")[1].split("/v1")[0]
        said = [*said, line]
    raise AssertionError(f"rill serve ended with {process.wait(10)} before it served: {''.join(said)}")
