"""The plan: a small file that says where each worker runs, who shares with whom, and in what chunks items flow.

    structure = "turns(chunks[64](series(rollout, reference)), actor)"

is the whole of it in one line. `series(a, b)`: on different devices, b fed by a while a goes on. `parallel(a, b)`: on
different devices, not feeding each other. `turns(a, b)`: on the same devices, one after the other, each leaving the
memory. `together(a, b)`: the same, both staying in memory. `chunks[64](x)`: items pass through x 64 at a time. The
tables below it give each worker's devices; times and memory are predictions, and `basis` says what they rest on.

`Plan.of` writes a search's result down; `load` reads a file that a person may have edited; `tree` gives the object that
`price`, the simulator and the runtime work with.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rill.config.toml import dumps
from rill.errors import PlanError
from rill.planning.cost import Problem, Seat
from rill.planning.frontier import Op
from rill.planning.graph import ARROW, Graph
from rill.planning.price import price, seat_of, stage_seconds
from rill.planning.search import Found, Mode, Tree, best_of_modes, search

_NAME = re.compile(r"[A-Za-z0-9_.+\-]+")
_OPS = {"series": Op.SERIES, "parallel": Op.PARALLEL, "turns": Op.TURNS, "together": Op.TOGETHER}


class Placed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A worker's part of the plan."""

    devices: str
    """Global device ids, as a placement is written: "0-3,8"."""
    kind: str
    parallel: int = 1
    """Devices to a replica."""
    pinned: bool = False
    """Its devices were given, not found."""
    shares_with: tuple[str, ...] = ()
    swaps: bool = False
    """Leaves the device's memory when its turn ends."""
    chunk: int
    """Items that it takes at a time."""
    seconds: float = 0.0
    """Predicted, of a step."""
    spread: float = 0.0
    """Relative uncertainty of that."""
    memory: float = 0.0
    """Predicted share of the fullest device."""
    basis: str = ""

    @property
    def ids(self) -> tuple[int, ...]:
        return parse_ids(self.devices)


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    structure: str
    mode: str
    batch: int
    lag: int = 0
    step_s: float = 0.0
    """Predicted."""
    spread: float = 0.0
    devices: dict[str, int]
    """How many of each kind it was made for."""
    workers: dict[str, Placed]
    edges: dict[str, int] = {}
    """Items that the target takes at a time, by "source -> target"."""
    rejected: dict[str, str] = {}
    """The best of the other modes, and why it lost."""
    notes: tuple[str, ...] = ()
    """What to know before trusting it: a profile of another machine, for instance."""

    @classmethod
    def of(
        cls,
        problem: Problem,
        found: Found,
        *,
        others: Sequence[tuple[Mode, Found | str]] = (),
        basis: Mapping[str, str] | None = None,
        notes: Sequence[str] = (),
        tried_s: float | None = None,
    ) -> Plan:
        priced = price(problem, found.tree)  # the search drops the memory column where it does not matter
        found = priced if tried_s is None else Found(step_s=tried_s, tree=priced.tree)
        ids = _assigned(problem, found.tree)
        workers = _placed(problem, found.tree, ids, basis or {})
        busy = sum(placed.seconds for placed in workers.values())
        taken = {stage.nodes[0]: stage.chunk for stage in found.tree.stages()}
        return cls(
            structure=structure_text(found.tree),
            mode=str(found.tree.mode),
            batch=problem.graph.batch,
            lag=problem.lag,
            step_s=found.step_s,
            spread=sum(p.spread * p.seconds for p in workers.values()) / busy if busy else 0.0,
            devices={pool.kind: pool.count for pool in problem.pools},
            workers=workers,
            edges={f"{e.source}{ARROW}{e.target}": taken[e.target] for e in problem.graph.edges},
            rejected={str(mode): _why_it_lost(problem, found, other) for mode, other in others},
            notes=tuple(notes),
        )

    @classmethod
    def load(cls, path: Path | str) -> Plan:
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
            plan = msgspec.convert(values, cls, strict=False)
        except (OSError, ValueError) as error:  # msgspec's and TOML's are ValueErrors
            raise PlanError(f"cannot read the plan {path}: {error}") from None
        plan.validate()
        return plan

    def dumps(self) -> str:
        comments = {
            "structure": "see docs/planning.md",
            "step_s": f"predicted, ± {self.spread:.0%}",
            "lag": "steps that generation may be ahead",
        }
        comments |= {f"workers.{name}.memory": "share of a device" for name in self.workers}
        return dumps(msgspec.to_builtins(self), comments)

    def validate(self) -> None:
        """That the structure and the workers' devices say the same. PlanError names the first contradiction."""
        shape = _Structure(self.structure, self, {}).tree(self.batch)
        names = [seat.worker for stage in shape.stages() for seat in stage.seats]
        if sorted(names) != sorted(self.workers):
            raise PlanError(
                f"the structure runs {', '.join(names)}; there are devices for {', '.join(self.workers)}"
            )
        available = sum(self.devices.values())
        for name, placed in self.workers.items():
            if not placed.ids:
                raise PlanError(f"{name} has no device: give it at least {placed.parallel}")
            if max(placed.ids) >= available:
                raise PlanError(
                    f"{name} is placed on device {max(placed.ids)}; there are {available}, counted from 0"
                )
            if len(placed.ids) % placed.parallel:
                raise PlanError(
                    f"{name} has {len(placed.ids)} devices, which {placed.parallel} to a replica do not divide"
                )
            if self.batch % placed.chunk:
                raise PlanError(
                    f"{name} takes {placed.chunk} items at a time, which do not divide the batch of {self.batch}"
                )
        self._check_sharing(shape)

    @property
    def signature(self) -> str:
        """What the plan makes of a run: devices, chunks and lag. Two plans with the same one are the same run."""
        seats = " ".join(f"{name}@{placed.devices}" for name, placed in sorted(self.workers.items()))
        cut = " ".join(
            f"{arrow}:{chunk}" for arrow, chunk in sorted(self.edges.items()) if chunk < self.batch
        )
        ahead = f"; lag {self.lag}" if self.lag else ""
        staying = f"; {'+'.join(self.staying)} stay" if self.staying else ""
        return f"{self.batch}: {seats}" + (f"; {cut}" if cut else "") + ahead + staying

    @property
    def staying(self) -> tuple[str, ...]:
        """Those that share devices and are in memory there together; the most of them, where there are several such."""
        return tuple(sorted(_staying(_Structure(self.structure, self, {}).tree(self.batch))))

    def tree(self, graph: Graph) -> Tree:
        """What `price` and the simulator take; times are not filled in."""
        members = {node.name: node.members or (node.name,) for node in graph.nodes}
        return _Structure(self.structure, self, members).tree(self.batch)

    def _check_sharing(self, shape: Tree) -> None:
        for a, b in ((a, b) for a in self.workers for b in self.workers if a < b):
            node_a, node_b = _node_of(shape, a), _node_of(shape, b)
            if node_a == node_b:
                continue
            common = set(self.workers[a].ids) & set(self.workers[b].ids)
            op = shape.meeting(node_a, node_b).op
            if op in (Op.SERIES, Op.PARALLEL) and common:
                raise PlanError(
                    f"{a} and {b} are apart in the structure and both on devices {ids_text(common)}"
                )


def choose(
    problem: Problem,
    mode: Mode = Mode.AUTO,
    *,
    tried: Mapping[str, float] | None = None,
    basis: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> tuple[Plan, Found]:
    """The best plan of a mode, of all modes where it is auto; `tried`: what a step took under plans that were run
    (`Profile.tried`), which counts more than what was predicted."""
    best: dict[Mode, Found | str] = (
        best_of_modes(problem) if mode is Mode.AUTO else {mode: search(problem, mode)}
    )
    known: dict[Mode, Found] = {}
    tried_s: dict[Mode, float] = {}
    for one, found in best.items():
        if not isinstance(found, str):
            known[one] = found
            if (seconds := (tried or {}).get(Plan.of(problem, found).signature)) is not None:
                tried_s[one], known[one] = seconds, Found(step_s=seconds, tree=found.tree)
    winner = min(known, key=lambda one: known[one].step_s)
    found = known[winner]
    if winner in tried_s:
        predicted_s = price(problem, found.tree).step_s
        notes = [*notes, f"tried: {found.step_s:.3g} s a step, where {predicted_s:.3g} s was predicted"]
    others = [(one, known.get(one, str(best[one]))) for one in best if one is not winner]
    made = Plan.of(problem, found, others=others, basis=basis, notes=notes, tried_s=tried_s.get(winner))
    return made, found


# --- device ids -------------------------------------------------------------------------------------------


def ids_text(ids: Sequence[int] | set[int]) -> str:
    """0, 1, 2, 5 → "0-2,5"."""
    spans: list[list[int]] = []
    for i in sorted(ids):
        if spans and spans[-1][1] == i - 1:
            spans[-1][1] = i
        else:
            spans.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def parse_ids(text: str) -> tuple[int, ...]:
    ids: list[int] = []
    for part in filter(None, text.replace(" ", "").split(",")):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise PlanError(f'devices {text!r} cannot be read: write ids such as "0-3,8"')
        ids += range(int(first), int(last or first) + 1)
    if twice := next((i for i in ids if ids.count(i) > 1), None):
        raise PlanError(f"devices {text!r} names device {twice} twice")
    return tuple(ids)


def _assigned(problem: Problem, tree: Tree) -> dict[str, tuple[int, ...]]:
    """Global ids of every worker: from left to right, what is pinned first."""
    first, free = 0, []
    for pool in problem.pools:
        free.append(list(range(first, first + pool.count)))
        first += pool.count
    found: dict[str, tuple[int, ...]] = {}
    _assign(problem, tree, free, found)
    return found


def _pinned_in(problem: Problem, tree: Tree) -> set[int]:
    seats = [seat for stage in tree.stages() for seat in stage.seats]
    return {i for seat in seats for i in problem.pins.get(seat.worker, ())}


def _assign(problem: Problem, tree: Tree, free: list[list[int]], found: dict[str, tuple[int, ...]]) -> None:
    if tree.op in (Op.SERIES, Op.PARALLEL):
        first, second = tree.halves
        kept = _pinned_in(problem, second)
        wanted = _pinned_in(problem, first)
        mine, rest = [], []
        for ids, count in zip(free, first.devices):
            ordered = [i for i in ids if i in wanted] + [i for i in ids if i not in wanted and i not in kept]
            mine.append(sorted(ordered[:count]))
            rest.append([i for i in ids if i not in ordered[:count]])
        _assign(problem, first, mine, found)
        _assign(problem, second, rest, found)
        return
    for half in tree.halves:
        _assign(problem, half, free, found)
    left = [list(ids) for ids in free]
    for seat in tree.seats:
        kind = next(i for i, pool in enumerate(problem.pools) if pool.kind == seat.kind)
        pinned = problem.pins.get(seat.worker, ())
        found[seat.worker] = pinned or tuple(left[kind][: seat.devices])
        if tree.is_apart:
            left[kind] = [i for i in left[kind] if i not in found[seat.worker]]


# --- a search's result in words ---------------------------------------------------------------------------


def structure_text(tree: Tree) -> str:
    if tree.op is Op.STAGE:
        return tree.nodes[0]
    inside = ", ".join(structure_text(half) for half in tree.halves)
    if tree.op is Op.FINER:
        return f"chunks[{tree.halves[0].chunk}]({inside})"
    return f"{tree.op.name.lower()}({inside})"


def _placed(
    problem: Problem, tree: Tree, ids: Mapping[str, tuple[int, ...]], basis: Mapping[str, str]
) -> dict[str, Placed]:
    swapping = _swapping(tree)
    placed = {}
    for stage in tree.stages():
        for seat in stage.seats:
            _, option, _ = seat_of(problem, seat)
            sharing = [w for w in ids if w != seat.worker and set(ids[w]) & set(ids[seat.worker])]
            items = -(-stage.chunk // seat.replicas)
            placed[seat.worker] = Placed(
                devices=ids_text(ids[seat.worker]),
                kind=seat.kind,
                parallel=seat.parallel,
                pinned=seat.worker in problem.pins,
                shares_with=tuple(sharing),
                swaps=stage.nodes[0] in swapping,
                chunk=stage.chunk,
                seconds=stage_seconds(problem, stage),
                spread=option.work_s.spread(items),
                memory=stage.memory,
                basis=basis.get(seat.worker, ""),
            )
    return placed


def _staying(tree: Tree) -> list[str]:
    if tree.op is Op.TOGETHER and Op.TURNS not in tree.ops():
        return [seat.worker for stage in tree.stages() for seat in stage.seats]
    return max((_staying(half) for half in tree.halves), key=len, default=[])


def _swapping(tree: Tree) -> set[str]:
    own = set(tree.nodes) if tree.op is Op.TURNS else set()
    return own.union(*(_swapping(half) for half in tree.halves))


def _node_of(tree: Tree, worker: str) -> str:
    for stage in tree.stages():
        if worker == stage.nodes[0] or worker in stage.nodes[0].split("+"):
            return stage.nodes[0]
    raise PlanError(f"the structure does not run {worker}")


def _why_it_lost(problem: Problem, best: Found, other: Found | str) -> str:
    if isinstance(other, str):
        return other
    longer = other.step_s / best.step_s - 1 if best.step_s else 0.0
    stages = sorted(other.tree.stages(), key=lambda stage: -stage_seconds(problem, stage))
    slowest = stages[0]
    spent_s = stage_seconds(problem, slowest)
    text = f"{other.step_s:.4g} s, {longer:.1%} longer: {structure_text(other.tree)}; "
    if other.tree.mode is Mode.SPLIT:
        num = sum(slowest.devices)
        on = f"{num} device{'' if num == 1 else 's'}"
        return f"{text}{slowest.nodes[0]} on {on} sets the pace with {spent_s:.4g} s"
    worked = sum(stage_seconds(problem, stage) for stage in stages)
    swaps = max(0.0, other.step_s - worked) if other.tree.mode is Mode.SHARED else 0.0
    lost = f", {swaps:.3g} s go to swaps and weights" if swaps > 0.001 * other.step_s else ""
    return text + f"{slowest.nodes[0]} takes {spent_s:.4g} s of it{lost}"


# --- the structure's line, read ---------------------------------------------------------------------------


def _quoted(name: re.Match[str]) -> str:
    return name[0] if name[0].isdigit() or name[0] in (*_OPS, "chunks") else repr(name[0])


@dataclass
class _Structure:
    """A structure's line is an expression of Python's grammar, once the workers' names are quoted."""

    text: str
    plan: Plan
    members: Mapping[str, tuple[str, ...]]

    def tree(self, chunk: int) -> Tree:
        try:
            return self._tree(ast.parse(_NAME.sub(_quoted, self.text.strip()), mode="eval").body, chunk)
        except SyntaxError as error:
            raise PlanError(
                f"structure {self.text!r} cannot be read at {error.offset}: {error.msg}"
            ) from None

    def _tree(self, node: ast.expr, chunk: int) -> Tree:
        match node:
            case ast.Call(func=ast.Subscript(ast.Name("chunks"), ast.Constant(int(smaller))), args=[inside]):
                if smaller < 1 or chunk % smaller:
                    raise PlanError(
                        f"structure {self.text!r}: chunks of {smaller} do not divide {chunk} items"
                    )
                halves: tuple[Tree, ...] = (self._tree(inside, smaller),)
                op = Op.FINER
            case ast.Call(func=ast.Name(name), args=[first, second]) if name in _OPS:
                halves = (self._tree(first, chunk), self._tree(second, chunk))
                op = _OPS[name]
            case ast.Constant(str(name)):
                return self._stage(name, chunk)
            case _:
                raise PlanError(
                    f"structure {self.text!r}: {ast.unparse(node)} is no worker and none of chunks[n](x), "
                    f"{', '.join(f'{name}(x, y)' for name in _OPS)}"
                )
        nodes = tuple(name for half in halves for name in half.nodes)
        return Tree(op=op, nodes=nodes, chunk=chunk, halves=halves)

    def _stage(self, name: str, chunk: int) -> Tree:
        members = self.members.get(name) or ((name,) if name in self.plan.workers else tuple(name.split("+")))
        if missing := [member for member in members if member not in self.plan.workers]:
            raise PlanError(f"structure {self.text!r}: there are no devices for {missing[0]!r}")
        seats = []
        for member in members:
            placed = self.plan.workers[member]
            replicas = len(placed.ids) // placed.parallel
            seats.append(Seat(member, 0, placed.kind, placed.parallel, replicas))
        ids = [set(self.plan.workers[member].ids) for member in members]
        is_apart = len(members) > 1 and not set.intersection(*ids)
        return Tree(op=Op.STAGE, nodes=(name,), chunk=chunk, seats=tuple(seats), is_apart=is_apart)
