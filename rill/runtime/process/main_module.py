"""The user's script as seen by a worker: its classes must be importable though the worker runs another main.

A class of the script is pickled as "__main__.Name". In a worker, `__main__` loads the script on the first look at a
name it does not have: a worker that needs nothing of the script never pays for importing it. As with multiprocessing,
the script runs there under the name "__mp_main__", so `if __name__ == "__main__"` keeps its body to the driver.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import types
from dataclasses import dataclass
from typing import Any

from rill.errors import UserError

WORKER_MAIN = "__mp_main__"


@dataclass(frozen=True, slots=True)
class MainModule:
    """Where the driver's `__main__` came from: a file, or a module run with -m; neither in an interactive session."""

    path: str | None
    name: str | None


def describe_main() -> MainModule:
    """For the driver to send along; also lets it read back objects whose classes a worker found in the script."""
    main = sys.modules["__main__"]
    sys.modules.setdefault(WORKER_MAIN, main)
    spec = main.__spec__ if hasattr(main, "__spec__") else None
    if spec is not None and spec.name != "__main__":
        return MainModule(path=None, name=spec.name)
    path = main.__file__ if hasattr(main, "__file__") else None
    return MainModule(path=os.path.abspath(path) if path else None, name=None)


def install_main(described: MainModule) -> None:
    """In a worker: make `__main__` find the names of the driver's script when they are asked for."""
    here = types.ModuleType("__main__")
    sys.modules["__main__"] = sys.modules[WORKER_MAIN] = here
    lock = threading.RLock()  # several threads may ask at the same time
    is_loading = False

    def load_and_find(attribute: str) -> Any:
        nonlocal is_loading
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        with lock:
            if is_loading:  # this thread: the script asks its own __main__
                raise AttributeError(attribute)
            if "__getattr__" in here.__dict__:
                is_loading = True
                try:
                    _load(here, described)
                finally:
                    is_loading = False
                del here.__dict__["__getattr__"]
        if attribute not in here.__dict__:
            raise AttributeError(f"the script has no name {attribute!r}")
        return here.__dict__[attribute]

    here.__dict__["__getattr__"] = load_and_find


def _load(here: types.ModuleType, described: MainModule) -> None:
    if described.name is not None:
        names = runpy.run_module(described.name, run_name=WORKER_MAIN, alter_sys=True)
    elif described.path is not None and os.path.exists(described.path):
        names = runpy.run_path(described.path, run_name=WORKER_MAIN)
    else:
        raise UserError("a class of an interactive session cannot be sent to workers: put it into a file")
    here.__dict__.update({k: v for k, v in names.items() if k not in ("__name__", "__spec__", "__loader__")})
