"""Claim: none. What the planner and the simulator say of the workloads in RLinf's evaluation, from public figures
alone.

Profiles are built from parameter counts, H100 data sheets, the paper's batch sizes and maximum lengths, and rates
of use that are common knowledge (below). Nothing is fitted to the paper's results. Prints one JSON line a workload and
size: the plan chosen, the step of the best plan of each mode, simulated beside predicted, and what the paper reports.
docs/planning.md discusses where the two agree.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np
from report import report

from rill.planning.cost import Option, Pool, Problem, WorkerCost
from rill.planning.fit import constant, line
from rill.planning.graph import Edge, Graph, Node, Sync
from rill.planning.plan import structure_text
from rill.planning.search import Found, Mode, search
from rill.planning.simulator import simulate

FLOPS, HBM, LINK, PCIE = 989e12, 3.35e12, 50e9, 25e9
"""H100 SXM: dense bf16, bytes a second of memory, of a 400 Gb/s card, and of the way to the host as it is
met in practice."""
TRAIN_USE, SCORE_USE, DECODE_USE = 0.40, 0.50, 0.60
"""Of the peak: training and scoring of the arithmetic, decoding of the memory's bandwidth."""
DECODE_OVERHEAD_S = 0.004
"""Of a decoding step: launches, sampling, exchange between devices of a replica."""


@dataclass(frozen=True)
class Model:
    name: str
    params: float
    active: float
    layers: int
    hidden: int
    kv_heads: int
    rollout_parallel: int
    train_parallel: int


MODELS = {
    "1.5B": Model("Qwen2.5-1.5B", 1.54e9, 1.54e9, 28, 1536, 2, 1, 2),
    "7B": Model("Qwen2.5-7B", 7.62e9, 7.62e9, 28, 3584, 4, 2, 4),
    "14B": Model("Qwen2.5-14B", 14.8e9, 14.8e9, 48, 5120, 8, 2, 4),
    "32B": Model("Qwen2.5-32B", 32.8e9, 32.8e9, 64, 5120, 8, 4, 8),
    "30B-A3B": Model("Qwen3-30B-A3B", 30.5e9, 3.3e9, 48, 2048, 4, 4, 16),
}


def answer_lengths(longest: int) -> tuple[float, ...]:
    """Reasoning answers: log-normal with a median of a fifth of the limit, cut off at the limit (an assumption)."""
    drawn = np.random.default_rng(0).lognormal(math.log(longest * 0.21), 0.75, 1024)
    return tuple(float(x) for x in np.sort(np.clip(drawn, 200, longest - 1024)))


def rollout(model: Model, lengths: tuple[float, ...]) -> WorkerCost:
    tokens = np.array(lengths)
    parallel = model.rollout_parallel
    context = 512 + float((tokens**2).mean() / (2 * tokens.mean()))
    kv_bytes = 2 * model.layers * model.kv_heads * 128 * 2
    bandwidth = parallel * HBM * DECODE_USE
    token_s = DECODE_OVERHEAD_S + 2 * model.params / bandwidth
    sequence_s = context * kv_bytes / bandwidth + 2 * model.active / (parallel * FLOPS * SCORE_USE)
    room = 0.55 * 80e9 * parallel - 2 * model.params
    concurrency = int(min(256, max(8, room / (kv_bytes * context))))
    option = Option(
        kind="h100",
        parallel=parallel,
        work_s=line(0.0, sequence_s * float(tokens.mean())),
        tail_s=token_s,
        memory_bytes=constant(0.55 * 80e9),
        swap_s=2 * (2 * model.params / parallel) / PCIE,
    )
    return WorkerCost(options=(option,), lengths=lengths, streams=True, concurrency=concurrency)


def passes(model: Model, lengths: tuple[float, ...], num: float, use: float) -> float:
    """Seconds of one sequence: `num` forward passes' arithmetic over the devices of a replica."""
    tokens = np.array(lengths) + 512
    attention = 2 * model.layers * model.hidden * float((tokens**2).mean())
    return num * (2 * model.active * float(tokens.mean()) + attention) / (model.train_parallel * FLOPS * use)


def scorer(model: Model, lengths: tuple[float, ...]) -> WorkerCost:
    weights = 2 * model.params / model.train_parallel
    option = Option(
        kind="h100",
        parallel=model.train_parallel,
        work_s=line(0.05, passes(model, lengths, 1, SCORE_USE)),
        memory_bytes=constant(weights + 6e9),
        swap_s=2 * weights / PCIE,
    )
    return WorkerCost(options=(option,))


def trainer(model: Model, lengths: tuple[float, ...]) -> WorkerCost:
    held = 6 * model.params / model.train_parallel
    option = Option(
        kind="h100",
        parallel=model.train_parallel,
        work_s=line(0.1, passes(model, lengths, 4, TRAIN_USE)),  # forward, backward, and the forward again
        step_s=0.5 + 4 * model.params / model.train_parallel / LINK,
        memory_bytes=constant(held + 12e9),
        sharded_bytes=12 * model.params,
        swap_s=2 * held / PCIE,
    )
    return WorkerCost(options=(option,))


def grpo(size: str, gpus: int, batch: int, longest: int, *, is_scored: bool = True) -> Problem:
    model, lengths = MODELS[size], answer_lengths(longest)
    names = ["rollout", *(["inference"] if is_scored else []), "actor"]
    item_bytes = 12.0 * float(np.mean(lengths))
    return Problem(
        graph=Graph(
            nodes=tuple(Node(name=n) for n in names),
            edges=tuple(
                Edge(source=a, target=b, bytes_per_item=item_bytes) for a, b in zip(names, names[1:])
            ),
            syncs=(Sync(source="actor", target="rollout", bytes=2 * model.params),),
            batch=batch,
        ),
        workers={
            "rollout": rollout(model, lengths),
            "inference": scorer(model, lengths),
            "actor": trainer(model, lengths),
        },
        pools=(h100s(gpus),),
    )


def ppo(size: str, gpus: int, batch: int, longest: int) -> Problem:
    model, lengths = MODELS[size], answer_lengths(longest)
    names = ["rollout", "actor_inference", "critic_inference", "actor", "critic"]
    pairs = [(0, 1), (0, 2), (1, 3), (2, 3), (2, 4)]
    item_bytes = 12.0 * float(np.mean(lengths))
    return Problem(
        graph=Graph(
            nodes=tuple(Node(name=n) for n in names),
            edges=tuple(Edge(source=names[a], target=names[b], bytes_per_item=item_bytes) for a, b in pairs),
            syncs=(
                Sync(source="actor", target="rollout", bytes=2 * model.params),
                Sync(source="critic", target="critic_inference", bytes=2 * model.params),
            ),
            batch=batch,
        ),
        workers={
            "rollout": rollout(model, lengths),
            "actor_inference": scorer(model, lengths),
            "critic_inference": scorer(model, lengths),
            "actor": trainer(model, lengths),
            "critic": trainer(model, lengths),
        },
        pools=(h100s(gpus),),
    )  # fmt: skip


def embodied(gpus: int, *, on_gpu: bool) -> Problem:
    """OpenVLA (7.5B) with 256 ManiSkill environments of 80 steps, or with 512 LIBERO environments of 64 steps on 12
    processor cores to a GPU. The simulator's step is nearly the same for any number of environments (the paper's
    figure 3b) on a GPU, and 50 ms for each environment on a core. Training takes a third of generation (§2.2)."""
    envs, steps, params = (256, 80, 7.5e9) if on_gpu else (512, 64, 7.5e9)
    forwards = steps if on_gpu else steps / 8  # OpenVLA-OFT gives eight actions at once
    decode_s = 7 * 2 * params / (HBM * DECODE_USE) if on_gpu else 0.0
    env_s = 2 * params * 300 / (FLOPS * SCORE_USE)
    policy = Option(
        kind="h100",
        work_s=line(forwards * (decode_s + 0.01), forwards * env_s),
        memory_bytes=line(2 * params + 4e9, 0.4e9),
        swap_s=2 * 2 * params / PCIE,
    )
    if on_gpu:
        simulator = Option(
            kind="h100", work_s=line(steps * 0.25, steps * 0.0005), memory_bytes=line(4e9, 0.9e9), swap_s=1.0
        )
    else:
        simulator = Option(kind="core", work_s=line(0.0, steps * 0.05))
    actor = Option(
        kind="h100",
        work_s=line(0.1, forwards * (env_s + decode_s / 32) / 3),
        step_s=0.5,
        memory_bytes=constant(14e9),
        sharded_bytes=18 * params,
        swap_s=2 * 18 * params / gpus / PCIE,
    )
    pools = (h100s(gpus),) if on_gpu else (h100s(gpus), Pool(kind="core", count=12 * gpus))
    graph = Graph(
        nodes=tuple(Node(name=n) for n in ("simulator", "policy", "actor")),
        edges=(
            Edge(source="simulator", target="policy", bytes_per_item=steps * 150e3),
            Edge(source="policy", target="simulator"),
            Edge(source="policy", target="actor", bytes_per_item=steps * 150e3),
        ),
        syncs=(Sync(source="actor", target="policy", bytes=2 * params),),
        batch=envs,
    )
    workers = {
        "simulator": WorkerCost(options=(simulator,), rounds=steps),
        "policy": WorkerCost(options=(policy,), rounds=steps),
        "actor": WorkerCost(options=(actor,)),
    }
    return Problem(graph=graph.collapsed(), workers=workers, pools=pools)


def h100s(count: int) -> Pool:
    return Pool(kind="h100", count=count, memory_bytes=80e9, link_bytes_per_s=LINK, local_bytes_per_s=1e12)


CASES: list[tuple[str, Problem, str]] = [
    *(("GRPO 1.5B", grpo("1.5B", n, 4096, 28672), "temporal best of RLinf's modes") for n in (64, 128, 256)),
    *(("GRPO 7B", grpo("7B", n, 4096, 28672), "temporal; spatial 44-69% below veRL") for n in (64, 128, 256)),
    *(("GRPO 32B", grpo("32B", n, 4096, 28672), "temporal best of RLinf's modes") for n in (64, 128, 256, 1024)),
    ("PPO 1.5B", ppo("1.5B", 16, 256, 12288), "spatial +39.8% over temporal"),
    ("PPO 1.5B", ppo("1.5B", 32, 512, 12288), "spatial +19.4%"),
    ("PPO 1.5B", ppo("1.5B", 64, 1024, 12288), "spatial +18.6%"),
    ("PPO 7B", ppo("7B", 32, 256, 12288), "spatial +19.0 to +44.8% over temporal"),
    ("PPO 7B", ppo("7B", 128, 1024, 12288), "spatial +19.0 to +44.8%"),
    ("PPO 14B", ppo("14B", 64, 512, 12288), "spatial +17.7 to +25.7%"),
    ("PPO 14B", ppo("14B", 256, 1024, 12288), "spatial +17.7 to +25.7%"),
    *(
        ("GRPO 30B-A3B", grpo("30B-A3B", n, 1536, 20480, is_scored=False), said)
        for n, said in ((32, "spatial +31.2%"), (64, "spatial +7.2%"), (128, "temporal best"))
    ),
    *(("ManiSkill", embodied(n, on_gpu=True), "hybrid +52 to +69% over temporal") for n in (8, 16, 32)),
    *(("LIBERO", embodied(n, on_gpu=False), "temporal best") for n in (8, 16, 32)),
]  # fmt: skip


def best_of(problem: Problem, mode: Mode) -> Found | None:
    from rill.errors import PlanError

    try:
        return search(problem, mode)
    except PlanError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--quick", action="store_true", help="the first two workloads")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.only in case[0]]
    for name, problem, said in cases[:2] if arguments.quick else cases:
        found = {mode: best_of(problem, mode) for mode in Mode}
        best = found[Mode.AUTO]
        assert best is not None
        report(
            benchmark="planning_paper",
            workload=name,
            devices=problem.pools[0].count,
            chosen=str(best.tree.mode),
            plan=structure_text(best.tree),
            step_s={str(m): round(f.step_s, 1) for m, f in found.items() if f},
            simulated_s={
                str(m): round(simulate(problem, f.tree, steps=4).mean_step_s, 1)
                for m, f in found.items()
                if f
            },
            devices_of={s.nodes[0]: sum(s.devices) for s in best.tree.stages()},
            stages_s={
                s.nodes[0]: round(s.latency_s + (problem.graph.batch / s.chunk - 1) * s.interval_s, 1)
                for s in (found[Mode.SHARED] or best).tree.stages()
            },
            paper=said,
        )


if __name__ == "__main__":
    main()
