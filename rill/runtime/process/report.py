"""The stuck-run report: when a wait passes its deadline, who waits for whom on what, across the cluster.

`stuck` asks every process for its waits and stacks (waits.py) and the hub for its channels and turns, writes
`stuck-<n>.md` (a table, the ring if there is one, stacks) into a folder that outlives the session, and gives the error
to raise. Where one process is stuck, all soon are: for REPORT_EVERY_S the others name the first one's report.
"""

from __future__ import annotations

import graphlib
import logging
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rill.errors import RillError, StuckError
from rill.runtime.address import name_of
from rill.runtime.handle import Handle
from rill.runtime.process.call import NO_ARGUMENTS, Call
from rill.runtime.process.waits import dump

if TYPE_CHECKING:
    from rill.runtime.context import RuntimeContext

ASK_S = 2.0
REPORT_FROM_S = 10.0
"""Shorter deadlines are polls, and not worth asking every process what it is doing."""
REPORT_EVERY_S = 60.0
DUMP = b"dump"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Edge:
    """`waiter` cannot go on without `needed`."""

    waiter: str
    needed: str
    why: str
    wait_s: float


@dataclass(frozen=True, slots=True)
class Report:
    edges: list[Edge]
    stacks: dict[str, dict[str, str]] = field(default_factory=dict)
    silent: list[str] = field(default_factory=list)
    channels: dict[str, Any] = field(default_factory=dict)

    def cycle(self) -> list[str]:
        """Names that wait for each other in a ring, empty when there is none."""
        waits: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
        for edge in self.edges:
            waits.add(edge.waiter, edge.needed)
        try:
            waits.prepare()
        except graphlib.CycleError as error:
            ring: list[str] = error.args[1]  # from each to the one that waits for it, and back to the first
            return ring[:0:-1]
        return []

    def summary(self) -> str:
        """A few lines for the error message."""
        lines = [f"{e.waiter} waits for {e.needed} on {e.why} ({e.wait_s:.1f} s)" for e in self.edges[:12]]
        return "\n".join(f"  {line}" for line in [*lines, *self._remarks()])

    def markdown(self, title: str) -> str:
        parts = [f"# {title}", "", "| who | waits for | on | since |", "|---|---|---|---|"]
        parts += [f"| {e.waiter} | {e.needed} | {e.why} | {e.wait_s:.1f} s |" for e in self.edges]
        parts += ["", *self._remarks(), ""]
        parts += [f"- channel `{name}`: {row}" for name, row in sorted(self.channels.items())]
        for process, stacks in sorted(self.stacks.items()):
            parts += ["", f"## {process}"]
            for thread, text in stacks.items():
                parts += [f"### thread {thread}", "```", text.rstrip(), "```"]
        return "\n".join(parts) + "\n"

    def _remarks(self) -> list[str]:
        ring = self.cycle()
        return [
            *([f"ring: {' -> '.join([*ring, ring[0]])}"] if ring else ()),
            *([f"no answer from: {', '.join(self.silent)}"] if self.silent else ()),
        ]


def answer_dumps(context: RuntimeContext) -> None:
    """Have this process answer when its waits and stacks are asked for."""
    context.mailbox.on(DUMP, lambda sender, frames: Call.read(sender, frames).answer_at_once(context, dump()))


def stuck(context: RuntimeContext, what: str, limit_s: float) -> StuckError:
    """The error to raise for a wait on `what` that passed its deadline, with the report written beside it."""
    me = context.address.name
    return late(context, f"{me} waited {limit_s:g} s for {what}", limit_s, Edge(me, what, what, limit_s))


def late(context: RuntimeContext, message: str, limit_s: float, own: Edge | None = None) -> StuckError:
    """A passed deadline as an error; a long one comes with the report of who waits for whom."""
    return StuckError(explain(context, message, own) if limit_s >= REPORT_FROM_S else message)


def explain(context: RuntimeContext, message: str, own: Edge | None = None) -> str:
    """`message` about a passed deadline, with the report written and its summary added, or the report of another."""
    try:
        stem = f"stuck-{context.address.name}-{time.strftime('%H%M%S')}-{time.monotonic_ns() % 10**6:06d}"
        path = report_folder(context) / f"{stem}.md"
        other = context.hub.call("registry.claim_report", [str(path), REPORT_EVERY_S], ASK_S)
        if other:
            return f"{message}; {other}, written for another wait, has the whole picture"
        report = collect(context, own)
        path.write_text(report.markdown(message), encoding="utf-8")
    except (RillError, OSError) as error:
        return f"{message} (no report: {error})"
    return f"{message}; {path} has the whole picture:\n{report.summary()}"


def collect(context: RuntimeContext, own: Edge | None = None) -> Report:
    answers: dict[str, Any] = {context.address.name: dump()}
    others = [address for address in context.directory.everybody() if address.name not in answers]
    asking = Handle("dump", others)
    context.calls.call(asking, "", NO_ARGUMENTS, kind=DUMP)
    asking.ended(ASK_S)
    for address, outcome in zip(others, asking.so_far(), strict=True):
        if outcome is not None and outcome.error is None:
            answers[address.name] = outcome.value
    channels, channel_waits = context.hub.call("broker.overview", None, ASK_S)
    turns = context.hub.call("locks.turns", None, ASK_S)
    edges = _edges(answers, channels, turns, channel_waits)
    if own is not None and not any(edge.waiter == own.waiter for edge in edges):
        edges.insert(0, own)
    stacks = {name: answer["stacks"] for name, answer in answers.items()}
    silent = sorted(address.name for address in others if address.name not in answers)
    return Report(edges, stacks, silent, channels)


def report_folder(context: RuntimeContext) -> Path:
    """A folder that outlives the session: the run's logs, else the user's own in the temporary directory (also where
    the run's logs are not reachable from this node)."""
    logs = context.site.report_dir
    if logs is not None:
        try:
            logs.mkdir(parents=True, exist_ok=True)
            return logs
        except OSError as error:
            _log.warning("%s cannot be made (%s): the report goes elsewhere", logs, error)
    folder = Path(tempfile.gettempdir()) / f"rill-reports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


# --- the graph --------------------------------------------------------------------------------------------


def _edges(answers: dict[str, Any], channels: Any, turns: Any, channel_waits: Any) -> list[Edge]:
    now_s = time.monotonic()
    edges: list[Edge] = []
    for client, channel, kind, since_s in channel_waits:
        others = sorted(channels[channel]["consumers" if kind == "put" else "producers"]) or ["nobody yet"]
        why = f"{kind} on channel {channel}"
        edges += [Edge(name_of(client), needed, why, now_s - since_s) for needed in others]
    for turn in turns:
        for client, since_s in turn["waiting"].items():
            holders = [w for t in turns if t["group"] in turn["behind"] for w in t["inside"]]
            if not holders:
                holders = ["data" if not turn["has_data"] else "other groups' offload"]
            why = f"devices {turn['devices']}"
            edges += [Edge(name_of(client), holder, why, now_s - since_s) for holder in holders]
    known = {(edge.waiter, edge.why) for edge in edges}
    for waiter, answer in answers.items():
        for what, on, wait_s, _ in answer["waits"]:
            if not on.startswith(("channel:", "locks:")) and (waiter, what) not in known:
                known.add((waiter, what))
                edges.append(Edge(waiter, on, what, wait_s))
    return edges
