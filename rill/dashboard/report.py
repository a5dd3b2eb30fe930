"""One HTML file that shows a run: the dashboard's page with the data inside it.

Made by `rill report RUN` and at the end of `rill train`. Reads the run folder only, so it works on a run that goes on,
was killed, or was copied from elsewhere. The file needs no network and no server and can be mailed: what is too large
for that is left out evenly (the longest spans, groups spread over the run). Its content policy lets nothing run but the
page's own script, and model text is inside a data element, so markup in a rollout is text.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rill.dashboard import indexer, pages
from rill.dashboard.catalog import Catalog
from rill.dashboard.media import media_file
from rill.dashboard.rollouts import Rollouts
from rill.dashboard.server import page_html, static_text
from rill.dashboard.timeline import Timeline
from rill.errors import UserError
from rill.telemetry.run import Run, write_atomically

CARD_FILE = "run_card.md"
MAX_SPANS = 20_000
MAX_GROUPS = 400
MAX_ROLLOUT_BYTES = 12 * 1024 * 1024
MAX_MEDIA_BYTES = 4 * 1024 * 1024


def write_report(run: Run, out: Path | None = None) -> Path:
    """The path of the page; by default `report.html` in the run folder, and the run card beside it."""
    target = out if out is not None else run.path / "report.html"
    data = collect(run)
    if not data["metrics"]["steps"] and not data["timeline"]["lanes"]:
        raise UserError(f"{run.path} has neither metrics nor a trace yet: nothing to report")
    write_atomically(target, page_with(data))
    if out is None:
        write_atomically(run.path / CARD_FILE, card_text(run.name, data["overview"]["card"]))
    return target


def card_text(name: str, card: Sequence[Mapping[str, str]]) -> str:
    """The run card as a file to hand on with a result."""
    return f"# Run card: {name}\n" + "".join(f"\n**{row['question']}**\n{row['answer']}\n" for row in card)


def collect(run: Run) -> dict[str, Any]:
    """What the page asks a server for, all of it that a file can hold."""
    indexer.bring_up_to_date(run.path)
    catalog = Catalog([run.path], run.path.parent)
    key = next(iter(catalog.runs()))
    opened = catalog.open(key)
    timeline = Timeline(indexer.trace_indexes(run.path))
    rollouts = indexer.rollouts(run.path)
    view = timeline.longest(MAX_SPANS)
    return {
        "overview": pages.overview(catalog, key) | {"indexed": 1.0},
        "metrics": catalog.figures(opened).columns,
        "timeline": view,
        "spans": _attributes(timeline, view["spans"]),
        "rollouts": _groups(run, rollouts),
        "num_recorded": rollouts.num_groups,
        "config": pages.config(opened),
        "guards": pages.guards(opened),
        "system": pages.system(opened),
        "flow": pages.flow(opened),
    }


def page_with(data: dict[str, Any]) -> str:
    script, style = static_text("app.js"), static_text("app.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "media-src data:; base-uri 'none'; form-action 'none'"
    )
    # "<" cannot end the data element or open a comment when it is written as an escape.
    payload = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    page = page_html()
    for old, new in (
        (
            '<meta charset="utf-8">',
            f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        ),
        ('<link rel="stylesheet" href="/static/app.css">', f"<style>{style}</style>"),
        (
            '<script src="/static/app.js"></script>',
            f'<script type="application/json" id="rill-report">{payload}</script>\n<script>{script}</script>',
        ),
    ):
        assert page.count(old) == 1, f"static/index.html has no {old}"
        page = page.replace(old, new)
    return page


def _attributes(timeline: Timeline, spans: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """What the log says of the embedded spans beyond their times."""
    found = {}
    for span in spans:
        process, offset = span[4], span[5]
        record = timeline.span(process, offset)
        if record.get("attributes"):
            found[f"{process}:{offset}"] = {"process": record["process"], "attributes": record["attributes"]}
    return found


def _groups(run: Run, rollouts: Rollouts) -> list[dict[str, Any]]:
    """Groups spread over the run rather than its beginning, the oldest first."""
    places: list[tuple[int, int, int, int]] = []
    for log, index in enumerate(rollouts.indexes):
        rows = index.groups.read()
        versions, lengths = rows["version"].tolist(), rows["length"].tolist()
        places += [(version, log, place, lengths[place]) for place, version in enumerate(versions)]
    places.sort()
    media_bytes = 0
    found: list[dict[str, Any]] = []
    for i in _spread([length for *_, length in places]):
        _, log, place, _ = places[i]
        group = rollouts.group(log, place)
        media_bytes += _embed_media(run, group, MAX_MEDIA_BYTES - media_bytes)
        found.append({**group, "log": 0, "place": len(found)})
    return found


def _spread(lengths: Sequence[int]) -> list[int]:
    """Which of so many groups of these lengths a file has room for, evenly from the first to the last."""
    count = min(MAX_GROUPS, len(lengths))
    while count:
        wanted: list[int] = np.unique(np.linspace(0, len(lengths) - 1, count).astype(int)).tolist()
        num_bytes = sum(lengths[i] for i in wanted)
        if num_bytes <= MAX_ROLLOUT_BYTES:
            return wanted
        count = min(count - 1, count * MAX_ROLLOUT_BYTES // num_bytes)
    return []


def _embed_media(run: Run, group: dict[str, Any], room: int) -> int:
    """Pictures become part of the file while there is room; returns the bytes taken."""
    taken = 0
    for sample in group["samples"]:
        for media in sample.get("media") or []:
            try:
                path, kind = media_file(run.path, str(media.get("path", "")))
            except UserError:
                continue
            if path.stat().st_size <= room - taken:
                taken += path.stat().st_size
                media["data"] = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    return taken
