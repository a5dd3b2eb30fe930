"""Random batches as lists for the reference and as flat tensors for rill, and ranks that sum for real."""

import random
import threading
from dataclasses import fields, replace

import torch

from rill.algorithms import TokenBatch

NAMES = {
    "logp": "logprobs_N",
    "old": "old_logprobs_N",
    "mu": "rollout_logprobs_N",
    "ref": "ref_logprobs_N",
    "adv": "advantages_N",
    "lag": "lag_N",
    "teacher": "teacher_logprobs_N",
    "entropy": "entropy_N",
}


def random_sequences(seed, *, num_seqs=None, spread=0.4, fresh=False):
    """`fresh`: π = π_old = μ."""
    rng = random.Random(seed)
    seqs = []
    for _ in range(num_seqs or rng.randint(1, 5)):
        length = rng.randint(1, 7)
        old = [-rng.uniform(0.05, 3.0) for _ in range(length)]
        near = 0.0 if fresh else spread
        advantage = rng.gauss(0, 1)
        seqs.append(
            {
                "old": old,
                "logp": [min(o + rng.gauss(0, near), -0.01) for o in old] if not fresh else list(old),
                "mu": [min(o + rng.gauss(0, near), -0.01) for o in old] if not fresh else list(old),
                "ref": [min(o + rng.gauss(0, 0.5), -0.01) for o in old],
                "teacher": [min(o + rng.gauss(0, 0.5), -0.01) for o in old],
                "entropy": [rng.uniform(0.1, 2.0) for _ in old],
                "adv": [advantage + rng.choice([0.0, 0.3]) for _ in old],
                "mask": [1 if rng.random() < 0.8 else 0 for _ in old],
                "lag": [rng.randint(0, 4) for _ in old],
            }
        )
    if not any(sum(s["mask"]) for s in seqs):
        seqs[0]["mask"][0] = 1
    return seqs


def flat(seqs, dtype=torch.float64, **extra):
    """A TokenBatch whose logprobs carry a gradient."""
    tensors = {
        field: torch.tensor([v for s in seqs for v in s[name]], dtype=dtype) for name, field in NAMES.items()
    }
    tensors["logprobs_N"].requires_grad_()
    return TokenBatch(
        mask_N=torch.tensor([m for s in seqs for m in s["mask"]], dtype=dtype),
        seq_N=torch.tensor([i for i, s in enumerate(seqs) for _ in s["mask"]], dtype=torch.int64),
        num_seqs=len(seqs),
        **{**tensors, **extra},
    )


def with_padding(batch, seed):
    """The same batch with masked tokens of rubbish strewn in."""
    rng = random.Random(seed)
    keep, rubbish = [], []
    for i in range(batch.mask_N.numel()):
        for _ in range(rng.randint(0, 2)):
            keep.append(i)
            rubbish.append(True)
        keep.append(i)
        rubbish.append(False)
    index, is_rubbish = torch.tensor(keep), torch.tensor(rubbish)
    changed = {}
    for field in fields(batch):
        values = getattr(batch, field.name)
        if not field.name.endswith("_N") or values is None:
            continue
        picked = values.detach()[index]
        if field.name == "mask_N":
            picked = torch.where(is_rubbish, torch.zeros_like(picked), picked)
        elif field.name != "seq_N":
            picked = torch.where(
                is_rubbish, torch.full_like(picked, rng.choice([float("nan"), float("inf"), 9e9])), picked
            )
        changed[field.name] = picked
    changed["logprobs_N"].requires_grad_()
    return replace(batch, **changed), ~is_rubbish


class Ranks:
    """`run(work)` calls work(rank, reduce) on threads; reduce sums over them, as an all-reduce does."""

    def __init__(self, num_ranks):
        self.num_ranks = num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=20)
        self.slots = [None] * num_ranks

    def run(self, work):
        results, errors = [None] * self.num_ranks, []

        def body(rank):
            def reduce(values):
                self.slots[rank] = values
                self.barrier.wait()
                total = sum(self.slots[1:], start=self.slots[0])
                self.barrier.wait()
                return total

            try:
                results[rank] = work(rank, reduce)
            except Exception as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        if errors:
            raise errors[0]
        return results
