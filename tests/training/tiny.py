"""A model small enough to train in milliseconds, samples for it, and a way to run code on several ranks."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from rill.algorithms import Algorithm, AlgorithmConfig
from rill.models.loading import ModelConfig
from rill.training.parallel import Rendezvous
from rill.training.policy import PolicyTrainer
from rill.types import Sample, Trajectory
from tests.forks import Forked, fork

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


class _Ranks:
    """Processes that wait for calls: starting one costs more than most calls do."""

    def __init__(self, world_size: int) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the processes
        self.processes: list[Forked] = []
        self.calls: list[TextIO] = []
        for rank in range(world_size):
            theirs, ours = os.pipe()
            fds = [theirs, self.log.fileno()]
            self.processes.append(fork("tests.training.tiny:serve", rank, world_size, fds=fds))
            self.calls.append(open(ours, "w", encoding="utf-8"))  # noqa: SIM115  open as long as the process runs
            os.close(theirs)

    def call(self, folder: Path, function: str, timeout_s: float) -> list[Any]:
        for call in self.calls:
            call.write(f"{folder}\t{function}\n")
            call.flush()
        results = [folder / f"result-{rank}.pkl" for rank in range(len(self.processes))]
        deadline = time.monotonic() + timeout_s
        while not all(result.exists() for result in results):
            ended = [process.poll() is not None for process in self.processes]
            if time.monotonic() > deadline or any(ended):
                self.stop()
                self.log.seek(0)
                raise AssertionError(
                    f"{function}: ranks that ended: {ended}:\n{self.log.read().decode()[-3000:]}"
                )
            time.sleep(0.005)
        return [pickle.loads(result.read_bytes()) for result in results]

    def stop(self) -> None:
        _RUNNING.clear()
        for process, call in zip(self.processes, self.calls, strict=True):
            process.kill()
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                call.close()


_RUNNING: dict[int, _Ranks] = {}
"""At most one world."""


def run_ranks(
    folder: Path, world_size: int, function: str, arguments: Any, timeout_s: float = 280
) -> list[Any]:
    """Call `module:function(rendezvous, arguments)` in `world_size` processes; the results by rank."""
    if world_size not in _RUNNING:
        stop_ranks()
        _RUNNING[world_size] = _Ranks(world_size)
    (folder / "arguments.pkl").write_bytes(pickle.dumps(arguments))
    return _RUNNING[world_size].call(folder, function, timeout_s)


@atexit.register
def stop_ranks() -> None:
    for ranks in list(_RUNNING.values()):
        ranks.stop()


def serve(rank: int, world_size: int, calls_fd: int, log_fd: int) -> None:
    """A rank, until the other end of `calls_fd` is closed."""
    import importlib

    import torch.distributed as dist

    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    torch.set_num_threads(1)
    for line in open(calls_fd, encoding="utf-8"):  # noqa: SIM115  as long as the process runs
        place, _, target = line.strip().partition("\t")
        folder, (module, _, name) = Path(place), target.partition(":")
        rendezvous = Rendezvous(
            init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size, timeout_s=60
        )
        arguments = pickle.loads((folder / "arguments.pkl").read_bytes())
        result = getattr(importlib.import_module(module), name)(rendezvous, arguments)
        if dist.is_initialized():
            dist.destroy_process_group()
        draft = folder / f"draft-{rank}.pkl"
        draft.write_bytes(pickle.dumps(result))
        draft.rename(folder / f"result-{rank}.pkl")


def check_saved_off_the_device(
    make: Callable[[], PolicyTrainer], leave: Callable[[PolicyTrainer], None], folder: Path, *, rests: bool
) -> None:
    """What is saved of a trainer that left its device is the state of that moment, while it comes back, trains and
    leaves again. `rests`: it can be saved from where it lies; else it has to come back first."""
    t = make()
    for turn in range(2):
        t.update(make_samples(seed=turn))
        masters = {slot.name: slot.master.clone() for slot in t.engine.slots}
        leave(t)
        assert all(slot.master.untyped_storage().nbytes() == 0 for slot in t.engine.slots)
        assert t.rests_on_host == rests
        if not rests:
            t.onload()
        t.save(folder)
        t.onload()
        t.update(make_samples(seed=9))
        leave(t)
        t.onload()
        t.wait_saved()
        again = make()
        again.load(folder)
        for slot in again.engine.slots:
            assert torch.equal(slot.master, masters[slot.name]), slot.name
        t.load(folder)
        for one in (t, again):
            one.update(make_samples(seed=9))
        for a, b in zip(t.engine.slots, again.engine.slots, strict=True):
            assert torch.equal(a.master, b.master), a.name
