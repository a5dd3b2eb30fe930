"""Packing against padding, and prefix-tree packing against plain packing, on the CPU.

    python benchmarks/packing.py [--sequences 64] [--repeats 3]

Prints one JSON line per result. Real tokens per second of one training update of a small model on log-normal lengths;
the padded form is the same engine on rows of equal length.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
from training_h200 import SMALL, algorithm, make_batch, padded

from rill.models.loading import ModelConfig
from rill.training.packing import plan_micro_batches
from rill.training.policy import PolicyTrainer
from rill.types import Sample


def report(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def rate(samples: list[Sample], real_tokens: int, repeats: int, **values: Any) -> tuple[float, float]:
    """(real tokens per second, tokens computed) of one update."""
    settings = {"model": ModelConfig(shape=SMALL), "micro_batch_tokens": 16384, **values}
    trainer = PolicyTrainer(PolicyTrainer.Config(**settings), algorithm())
    trainer.update(samples)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        metrics = trainer.update(samples)
        times.append(time.perf_counter() - start)
    return real_tokens / float(np.median(times)), metrics["computed_tokens"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    samples = make_batch(args.tokens, SMALL["vocab_size"], 0, group=8, mean=4.8)
    real = sum(s.num_tokens for s in samples)
    packed, _ = rate(samples, real, args.repeats)
    tree, tree_tokens = rate(samples, real, args.repeats, tree_packing=True)
    rows, row_tokens = rate(padded(samples), real, args.repeats)
    report(name="packing/packed", tokens_per_s=packed, computed_tokens=real)
    report(name="packing/tree", tokens_per_s=tree, computed_tokens=tree_tokens, speedup=tree / packed)
    report(name="packing/padded", tokens_per_s=rows, computed_tokens=row_tokens, packed_speedup=packed / rows)
    lengths = np.random.default_rng(0).lognormal(6.5, 1.0, 4096).astype(int).clip(1, 8192).tolist()
    start = time.perf_counter()
    bins = plan_micro_batches(lengths, 16384)
    loads = [sum(lengths[i] for i in b) for b in bins]
    report(
        name="packing/plan",
        sequences=len(lengths),
        ms=(time.perf_counter() - start) * 1e3,
        bins=len(bins),
        fill=sum(loads) / (len(bins) * 16384),
    )


if __name__ == "__main__":
    main()
