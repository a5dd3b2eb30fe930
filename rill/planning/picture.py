"""A graph as a picture: plain text for a terminal, Mermaid for a page. Called by `rill plan --graph`."""

from __future__ import annotations

from collections.abc import Callable

from rill.errors import PlanError
from rill.planning.graph import Graph

_SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def draw(graph: Graph, style: str) -> str:
    styles: dict[str, Callable[[Graph], str]] = {"text": _text, "mermaid": _mermaid}
    if style not in styles:
        raise PlanError(f"no picture of style {style!r}: choose from {', '.join(styles)}")
    return styles[style](graph)


def size_text(num_bytes: float) -> str:
    for unit, size in _SIZES:
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def _text(graph: Graph) -> str:
    lines = [f"{graph.batch} items a step"]
    for node in graph.nodes:
        note = f"   a cycle of {', '.join(node.members)}" if node.members else ""
        note += f"   traced on devices {','.join(map(str, node.devices))}" if node.devices else ""
        lines.append(f"{node.name}{note}")
        lines += [
            f"  └─▶ {edge.target}   {size_text(edge.bytes_per_item)} an item"
            for edge in graph.edges
            if edge.source == node.name
        ]
        lines += [
            f"  ⇢ {sync.target}   weights, {size_text(sync.bytes)} a step"
            for sync in graph.syncs
            if sync.source == node.name
        ]
    return "\n".join(lines)


def _mermaid(graph: Graph) -> str:
    ids = {node.name: f"n{i}" for i, node in enumerate(graph.nodes)}
    lines = ["flowchart LR"]
    for node in graph.nodes:
        left, right = ("[[", "]]") if node.members else ("[", "]")
        lines.append(f'  {ids[node.name]}{left}"{node.name}"{right}')
    lines += [f"  {ids[e.source]} -->|{size_text(e.bytes_per_item)}| {ids[e.target]}" for e in graph.edges]
    lines += [f"  {ids[s.source]} -.->|weights {size_text(s.bytes)}| {ids[s.target]}" for s in graph.syncs]
    return "\n".join(lines)
