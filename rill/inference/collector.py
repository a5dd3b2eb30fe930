"""Python's cycle collector, kept from interrupting an engine that runs on a device, a server, and episodes.

A full collection walks through everything that lives: with transformers loaded half a million objects and a tenth of a
second in which no step is launched and no request answered. And a step of 1,000 sequences, or an answer, makes
thousands of short-lived containers, for which the collector would look several times. So what exists when an engine or
a server is ready is left out of collections, and they come rarer, until the last holder of the process has gone; then
all is as it was.
"""

from __future__ import annotations

import gc
import threading

NEW_CONTAINERS = 50_000
"""Between two looks for cycles among the newest containers."""

_lock = threading.Lock()
_holders: set[CollectorHold] = set()
_threshold = gc.get_threshold()


class CollectorHold:
    """One holder's share in it. take() and give_back() may each be called twice."""

    def take(self) -> None:
        global _threshold
        with _lock:
            if not _holders:
                _threshold = gc.get_threshold()
                gc.set_threshold(max(NEW_CONTAINERS, _threshold[0]), *_threshold[1:])
            _holders.add(self)
            gc.collect()
            gc.freeze()

    def give_back(self) -> None:
        with _lock:
            if self in _holders:
                _holders.remove(self)
                if not _holders:
                    gc.unfreeze()
                    gc.set_threshold(*_threshold)
