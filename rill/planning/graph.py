"""The workflow as a graph: nodes are worker groups, edges are channels.

`traced.graph_of` draws it from what the runtime saw; a profile holds the same for people to read and edit:

    [graph]
    batch = 512                                  # items of a step
    nodes = ["rollout", "reference", "actor"]
    [graph.edges]
    "rollout -> reference" = 57344.0             # bytes of one item
    [graph.syncs]
    "actor -> rollout" = 3.1e9                   # bytes of the weights, once a step

The search wants no cycles: `collapsed` makes one node of each (environment ↔ policy becomes "env+policy").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec

from rill.errors import PlanError

ARROW = " -> "


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    name: str
    members: tuple[str, ...] = ()
    """The nodes of a cycle that was collapsed into this one; empty for an ordinary node."""
    devices: tuple[int, ...] = ()
    """Devices that its calls held while they were traced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    source: str
    target: str
    bytes_per_item: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """Weights that travel once a step, against the data: from the worker that trains to one that uses them."""

    source: str
    target: str
    bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Nodes in an order that edges follow (where there is no cycle)."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    syncs: tuple[Sync, ...] = ()
    batch: int = 1
    """Items that pass through in one step."""

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        if not names:
            raise PlanError("the graph has no node: trace a step that passes items, or list nodes")
        if self.batch < 1:
            raise PlanError(f"the graph's batch is {self.batch}: a step passes at least one item")
        if len(set(names)) < len(names):
            raise PlanError(f"the graph names a node twice: {names}")
        ends = [end for e in self.edges for end in (e.source, e.target)]
        ends += [end for s in self.syncs for end in (s.source, s.target)]
        for end in ends:
            if end not in names:
                raise PlanError(f"an edge names {end!r}; the nodes are {', '.join(names)}")

    @classmethod
    def from_values(cls, values: Mapping[str, Any], where: str = "graph") -> Graph:
        try:
            written = msgspec.convert(values, _Written)
        except msgspec.ValidationError as error:
            raise PlanError(f"{where}: {error}; a graph has batch, nodes, edges and syncs") from None
        return cls(
            nodes=tuple(Node(name=name) for name in written.nodes),
            edges=tuple(
                Edge(source=s, target=t, bytes_per_item=size)
                for (s, t), size in _arrows(written.edges, where)
            ),
            syncs=tuple(
                Sync(source=s, target=t, bytes=size) for (s, t), size in _arrows(written.syncs, where)
            ),
            batch=written.batch,
        )

    def values(self) -> dict[str, Any]:
        """What `from_values` reads."""
        return {
            "batch": self.batch,
            "nodes": [node.name for node in self.nodes],
            "edges": {f"{e.source}{ARROW}{e.target}": e.bytes_per_item for e in self.edges},
            "syncs": {f"{s.source}{ARROW}{s.target}": s.bytes for s in self.syncs},
        }

    def collapsed(self) -> Graph:
        """The graph without cycles: each becomes one node, "a+b", with its members; nodes in the edges' order."""
        circles = list(_strongly_connected([n.name for n in self.nodes], self.edges))
        by_name = {node.name: node for node in self.nodes}
        new_name: dict[str, str] = {}
        nodes = []
        for circle in circles:
            name = "+".join(circle)
            new_name.update(dict.fromkeys(circle, name))
            devices = sorted({device for member in circle for device in by_name[member].devices})
            members = tuple(circle) if len(circle) > 1 else by_name[circle[0]].members
            nodes.append(Node(name=name, members=members, devices=tuple(devices)))
        sizes: dict[tuple[str, str], float] = {}
        for edge in self.edges:
            pair = (new_name[edge.source], new_name[edge.target])
            sizes[pair] = sizes.get(pair, 0.0) + edge.bytes_per_item
        moved = [replace(s, source=new_name[s.source], target=new_name[s.target]) for s in self.syncs]
        return Graph(
            nodes=tuple(nodes),
            edges=tuple(
                Edge(source=s, target=t, bytes_per_item=size) for (s, t), size in sizes.items() if s != t
            ),
            syncs=tuple(sync for sync in moved if sync.source != sync.target),
            batch=self.batch,
        )

    # --- as sets of nodes: bit i stands for nodes[i] ---

    @property
    def everything(self) -> int:
        return (1 << len(self.nodes)) - 1

    def names_in(self, part: int) -> list[str]:
        return [node.name for i, node in enumerate(self.nodes) if part >> i & 1]

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """For each node, those it takes from."""
        index = {node.name: i for i, node in enumerate(self.nodes)}
        found = [0] * len(self.nodes)
        for edge in self.edges:
            found[index[edge.target]] |= 1 << index[edge.source]
        return tuple(found)

    def mask(self, names: Iterable[str]) -> int:
        wanted = set(names)
        return sum(1 << i for i, node in enumerate(self.nodes) if node.name in wanted)

    def between(self, first: int, second: int) -> tuple[list[float], float]:
        """What crosses a cut: bytes of an item on each edge, and bytes of weights, once a step, either way."""
        index = {node.name: i for i, node in enumerate(self.nodes)}

        def crosses(source: str, target: str) -> bool:
            return bool(first >> index[source] & 1 and second >> index[target] & 1)

        sizes = [edge.bytes_per_item for edge in self.edges if crosses(edge.source, edge.target)]
        syncs = [s for s in self.syncs if crosses(s.source, s.target) or crosses(s.target, s.source)]
        return sizes, sum(sync.bytes for sync in syncs)

    def cuts(self, part: int) -> list[int]:
        """The source sides of all s–t cuts of a part: no edge leads back from the rest into it."""
        inside = [i for i in range(len(self.nodes)) if part >> i & 1]
        sides = [0]
        for i in inside:  # nodes follow the edges' order: parents come first
            needed = self.parents[i] & part
            sides += [side | 1 << i for side in sides if needed & ~side == 0]
        return [side for side in sides if side not in (0, part)]


class _Written(msgspec.Struct, forbid_unknown_fields=True):
    """A graph as it stands in a profile."""

    nodes: list[str] = []
    edges: dict[str, float] = {}
    syncs: dict[str, float] = {}
    batch: int = 1


def _arrows(table: Mapping[str, float], where: str) -> Iterator[tuple[tuple[str, str], float]]:
    for key, size in table.items():
        source, arrow, target = key.partition(ARROW)
        if not arrow:
            raise PlanError(f'{where}: {key!r} is no edge: write "source{ARROW}target" = bytes')
        yield (source, target), size


def _strongly_connected(names: Sequence[str], edges: Iterable[Edge]) -> Iterator[list[str]]:
    """Sets of nodes that reach each other, sources first; inside a set and among equals, in the order given."""
    follows = {name: [e.target for e in edges if e.source == name] for name in names}
    reach: dict[str, set[str]] = {}
    for name in names:
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            for target in follows[waiting.pop()]:
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        reach[name] = seen
    circles: list[list[str]] = []
    placed: set[str] = set()
    for name in names:
        if name not in placed:
            circle = [o for o in names if o == name or (o in reach[name] and name in reach[o])]
            placed.update(circle)
            circles.append(circle)
    while circles:  # a source: nothing that is left leads to it from outside
        first = next(
            circle for circle in circles
            if not any(circle[0] in reach[other[0]] for other in circles if other is not circle)
        )  # fmt: skip
        circles.remove(first)
        yield first
