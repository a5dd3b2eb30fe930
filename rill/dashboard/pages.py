"""What each page is shown from: one function a page, each from a run's files to plain data.

The server answers requests with these, and the report embeds them, so the live page and the mailed file are one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from rill.dashboard import indexer
from rill.dashboard.card import machine, run_card, time_shares
from rill.dashboard.catalog import Catalog, findings
from rill.dashboard.config_view import read_config
from rill.dashboard.figures import Figures
from rill.dashboard.system import counter_series
from rill.dashboard.timeline import Timeline
from rill.telemetry.metrics import read_metrics
from rill.telemetry.rollouts import each_group, in_order
from rill.telemetry.run import Run
from rill.telemetry.sinks.base import Account

PLAN_FILE, FLOW_FILE = "plan.json", "flow.json"
MAX_JSON_BYTES = 8 * 1024 * 1024
LOG_TAIL_BYTES = 64 * 1024
MAX_TOLD_GROUPS = 50


def overview(catalog: Catalog, key: str) -> dict[str, Any]:
    """The run's head: status, what the guards found, the card, where the time went."""
    run = catalog.open(key)
    figures = catalog.figures(run)
    values, _, _ = read_config(run.config_path)
    starts = run.starts()
    return {
        **catalog.summary(key, run),
        "findings": findings(run),
        "machine": machine(starts),
        "card": run_card(values, starts, figures),
        "shares": time_shares(figures, indexer.trace_indexes(run.path)),
        "indexed": round(indexer.progress(run.path), 4),
        "num_steps": _planned_steps(values),
        "resume": run.resume_command,
    }


def config(run: Run) -> dict[str, Any]:
    _, rows, problem = read_config(run.config_path)
    return {"rows": [[row.key, row.value, row.origin] for row in rows], "problem": problem}


def guards(run: Run) -> dict[str, Any]:
    return {"findings": findings(run), "log": log_tail(run)}


def system(run: Run) -> dict[str, Any]:
    indexes = indexer.trace_indexes(run.path)
    return {"series": counter_series(indexes, Timeline(indexes).begin_ns)}


def flow(run: Run) -> dict[str, Any]:
    """The traced graph and the plan, as other parts of rill leave them; None where they have not."""
    return {"flow": read_json(run.path / FLOW_FILE), "plan": read_json(run.path / PLAN_FILE)}


def timeline(run: Run) -> Timeline:
    return Timeline(indexer.trace_indexes(run.path))


def account_of(run: Run) -> Account:
    """What trackers are told when a run ends: its card, and the samples of groups spread over the run."""
    figures = Figures(rows=read_metrics(run.path))
    values, _, _ = read_config(run.config_path)
    names = sorted(map(in_order, each_group(run)))
    chosen = set(names[:: max(1, len(names) // MAX_TOLD_GROUPS)])
    return Account(
        card=[(row["question"], row["answer"]) for row in run_card(values, run.starts(), figures)],
        rollouts=[
            (group.version - 1, sample.prompt, sample.response, sample.score)
            for group in sorted((each for each in each_group(run) if in_order(each) in chosen), key=in_order)
            for sample in group.samples
        ],
    )


def read_json(path: Path) -> dict[str, Any] | None:
    """A small file of the run folder. Damaged, too large or a link: {"problem": words}."""
    if not path.exists():
        return None
    if path.is_symlink() or path.stat().st_size > MAX_JSON_BYTES:
        return {"problem": f"{path.name} is a link or larger than {MAX_JSON_BYTES // 1024**2} MiB"}
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return {"problem": f"{path.name} cannot be read: {error}"}
    return found if isinstance(found, dict) else {"problem": f"{path.name} is no JSON object"}


def log_tail(run: Run) -> str:
    """The end of what the run said."""
    path = run.log_path
    if path.is_symlink() or not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES))
        return file.read(LOG_TAIL_BYTES).decode("utf-8", "replace")


def _planned_steps(values: dict[str, Any]) -> int | None:
    loop = values.get("loop")
    steps = loop.get("steps") if isinstance(loop, dict) else None
    return steps if isinstance(steps, int) else None
