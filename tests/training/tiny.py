"""A model small enough to train in milliseconds, samples for it, and a way to run code on several ranks."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rill.algorithms import Algorithm, AlgorithmConfig
from rill.models.loading import ModelConfig
from rill.training.parallel import Rendezvous
from rill.training.policy import PolicyTrainer
from rill.types import Sample, Trajectory

VOCAB = 128
SHAPE: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
}
MODEL = ModelConfig(shape=SHAPE, tokenizer="chars")


def make_samples(count: int = 8, *, seed: int = 0, group: int = 4, longest: int = 24) -> list[Sample]:
    """Groups that share a prompt, answers of mixed lengths, some untrained tokens inside the answers."""
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    prompt = np.zeros(0, dtype=np.int32)
    for index in range(count):
        if index % group == 0:
            prompt = rng.integers(0, VOCAB, rng.integers(3, 9)).astype(np.int32)
        answer = rng.integers(0, VOCAB, rng.integers(2, longest)).astype(np.int32)
        tokens = np.concatenate([prompt, answer])
        sampled = np.arange(len(tokens)) >= len(prompt)
        mask = sampled & (rng.random(len(tokens)) < 0.9)
        mask[-1] = True
        trajectory = Trajectory(
            id=f"t{index}",
            group_id=f"g{index // group}",
            prompt_id=f"p{index // group}",
            token_ids=tokens,
            logprobs=np.where(sampled, -4.0 + 0.1 * rng.normal(size=len(tokens)), 0).astype(np.float32),
            versions=np.where(sampled, 0, -1).astype(np.int32),
            loss_mask=mask,
            turn_ids=sampled.astype(np.int32),
        )
        advantages = np.where(mask, rng.normal(), 0).astype(np.float32)
        samples.append(Sample(trajectory=trajectory, advantages=advantages))
    return samples


def config(**values: Any) -> PolicyTrainer.Config:
    values.setdefault("optimizer", {"learning_rate": 1e-3})
    return PolicyTrainer.Config(**{"model": MODEL, "micro_batch_tokens": 4096, **values})


def algorithm(**values: Any) -> Algorithm:
    return Algorithm(AlgorithmConfig.model_validate({"type": "grpo", "aggregation": "token-mean", **values}))


def trainer(rendezvous: Rendezvous | None = None, **values: Any) -> PolicyTrainer:
    return PolicyTrainer(config(**values), algorithm(), rendezvous=rendezvous)


def run_ranks(
    folder: Path, world_size: int, function: str, arguments: Any, timeout_s: float = 120
) -> list[Any]:
    """Call `module:function(rendezvous, arguments)` in `world_size` processes; the results by rank."""
    (folder / "arguments.pkl").write_bytes(pickle.dumps(arguments))
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.training.tiny", str(folder), str(rank), str(world_size), function],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parents[2],
        )
        for rank in range(world_size)
    ]
    failures: list[str] = []
    for rank, process in enumerate(processes):
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        if process.returncode != 0:
            failures.append(f"rank {rank} ended with {process.returncode}:\n{output.decode()[-3000:]}")
    assert not failures, "\n".join(failures)
    return [pickle.loads((folder / f"result-{rank}.pkl").read_bytes()) for rank in range(world_size)]


def _main(argv: Sequence[str]) -> None:
    import importlib

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    folder, rank, world_size, target = Path(argv[0]), int(argv[1]), int(argv[2]), argv[3]
    module, _, name = target.partition(":")
    rendezvous = Rendezvous(
        init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size, timeout_s=60
    )
    result = getattr(importlib.import_module(module), name)(
        rendezvous, pickle.loads((folder / "arguments.pkl").read_bytes())
    )
    (folder / f"result-{rank}.pkl").write_bytes(pickle.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()  # gloo's threads, alive at the interpreter's end, abort the process now and then


if __name__ == "__main__":
    _main(sys.argv[1:])
