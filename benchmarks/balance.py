"""Claim: samples are split over ranks by cost in under 50 ms (4,096 samples, 64 ranks) with under 3 % imbalance.

Lengths are log-normal, as rollouts are. Prints one JSON line per case: the time of `partition` (best of several
rounds) and the imbalance it leaves, next to what rivals leave on the same lengths: a round-robin split by count,
and full Karmarkar–Karp as usually written. `floor` is the imbalance that no split can beat, when one sample alone
costs more than a rank's share; `collective_wait` is how much longer all passes take than the mean rank computes.

    python benchmarks/balance.py [--quick]
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections.abc import Callable
from itertools import zip_longest

import numpy as np
import numpy.typing as npt
from report import report

from rill.training.balance import CostModel, imbalance, partition
from rill.training.packing import plan_micro_batches

Costs = npt.NDArray[np.float64]
COST = CostModel.of_transformer(num_parameters=1_500_000_000, num_layers=28, hidden_size=1536)
TOKEN_BUDGET = 16_384


def log_normal(count: int, seed: int) -> list[int]:
    """Median 1,100 tokens, a tail to 16k."""
    lengths = np.random.default_rng(seed).lognormal(7.0, 0.8, count)
    return [int(n) for n in np.clip(lengths, 16, TOKEN_BUDGET)]


def by_count(costs: Costs, num_ranks: int) -> list[list[int]]:
    return [list(range(rank, len(costs), num_ranks)) for rank in range(num_ranks)]


def plain_differencing(costs: Costs, num_ranks: int) -> list[list[int]]:
    """Karmarkar–Karp over Python tuples, one sample to a state."""
    heap = []
    for index, cost in enumerate(costs):
        slots = [(float(cost), [index])] + [(0.0, []) for _ in range(num_ranks - 1)]
        heap.append((-float(cost), index, slots))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda slot: -slot[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
        number += 1
    return [members for _, members in heap[0][2]]


def pass_costs(share: list[int], num_passes: int) -> list[float]:
    """What each of a rank's passes costs, packed as the trainer packs them."""
    bins = plan_micro_batches(share, TOKEN_BUDGET, at_least=num_passes)
    return [float(COST([share[i] for i in bin_]).sum()) for bin_ in bins]


def best_ms(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - start_s)
    return min(times) * 1e3


def case(count: int, num_ranks: int, *, rounds: int, rivals: bool) -> dict[str, object]:
    lengths = log_normal(count, seed=count)
    costs = COST(lengths)
    mean = float(costs.sum()) / num_ranks
    shares = [[lengths[i] for i in part] for part in partition(costs, num_ranks)]
    num_passes = max(len(plan_micro_batches(share, TOKEN_BUDGET)) for share in shares)
    passes = [pass_costs(share, num_passes) for share in shares]
    longest = sum(max(column) for column in zip_longest(*passes, fillvalue=0.0))
    line: dict[str, object] = {
        "benchmark": "balance",
        "samples": count,
        "ranks": num_ranks,
        "partition_ms": round(best_ms(lambda: partition(costs, num_ranks), rounds), 2),
        "imbalance": round(imbalance(costs, partition(costs, num_ranks)), 6),
        "floor": round(max(0.0, float(costs.max()) / mean - 1.0), 6),
        "micro_batches_ms_a_rank": round(
            best_ms(lambda: plan_micro_batches(shares[0], TOKEN_BUDGET, at_least=num_passes), rounds), 2
        ),
        "micro_batches": num_passes,
        "collective_wait": round(longest / mean - 1.0, 6),
        "by_count_imbalance": round(imbalance(costs, by_count(costs, num_ranks)), 6),
    }
    if rivals:
        line["plain_differencing_ms"] = round(best_ms(lambda: plain_differencing(costs, num_ranks), 1), 2)
        line["plain_differencing_imbalance"] = round(
            imbalance(costs, plain_differencing(costs, num_ranks)), 6
        )
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run, whose figures mean little")
    quick = parser.parse_args().quick
    cases = [(256, 8)] if quick else [(256, 8), (512, 64), (1024, 64), (4096, 64), (16_384, 256)]
    for count, num_ranks in cases:
        line = case(count, num_ranks, rounds=1 if quick else 10, rivals=count <= 4096)
        if (count, num_ranks) == (4096, 64):
            line["holds"] = bool(
                float(str(line["partition_ms"])) < 50 and float(str(line["imbalance"])) < 0.03
            )
        report(**line)


if __name__ == "__main__":
    main()
