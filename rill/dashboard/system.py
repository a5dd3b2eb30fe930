"""Processor, memory, disk, network and accelerators over time, by process: the counters in a run's traces.

The counters are written by rill.telemetry.system. A series is averaged down to the width of the plot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rill.dashboard.trace_index import TraceIndex

MAX_POINTS = 600
MAX_READ = 200_000
"""Rows read of one process: the newest."""
PAUSE_S = 60.0
"""A counter that is silent for longer was not written: the run was killed, and resumed later."""
NS = 1_000_000_000


def counter_series(indexes: Sequence[TraceIndex], begin_ns: int) -> list[dict[str, Any]]:
    """[{process, name, x: seconds, y}], one for each counter of each process."""
    found = []
    for index in indexes:
        rows = index.counters.read(max(0, index.counters.num_rows - MAX_READ))
        for code, name in enumerate(index.state.counter_names):
            own = rows[rows["name"] == code]
            if not len(own):
                continue
            edges = np.linspace(0, len(own), min(MAX_POINTS, len(own)) + 1).astype(np.int64)
            counts = np.diff(edges)
            x = np.add.reduceat(own["at"].astype(np.float64) - begin_ns, edges[:-1]) / counts / NS
            y = np.add.reduceat(own["value"], edges[:-1]) / counts
            waits = np.diff(x, append=x[-1])
            pauses = np.flatnonzero(waits > max(PAUSE_S, 10 * float(np.median(waits))))
            x, y = np.insert(x, pauses + 1, x[pauses] + 1), np.insert(y, pauses + 1, np.nan)
            found.append(
                {
                    "process": index.state.process or index.log.stem,
                    "name": name,
                    "x": np.round(x, 2).tolist(),
                    "y": [float(f"{value:.5g}") if np.isfinite(value) else None for value in y],
                }
            )
    return found
