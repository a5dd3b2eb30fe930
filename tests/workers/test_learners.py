"""What learners know of a batch that comes in chunks: its figures, and the KL controller that follows them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rill.algorithms import Algorithm, AlgorithmConfig
from rill.training.parallel import World
from rill.training.value import ValueTrainer
from rill.types import Sample
from rill.workers.edges import Part
from rill.workers.learners import Advantages, CriticWorker
from rill.workers.records import Chunk, Outcome
from tests.training.tiny import MODEL, make_samples

KL = {
    "coefficient": 0.1,
    "place": "reward",
    "controller": {"type": "adaptive", "target": 0.01, "horizon": 20},
}


def scored(num: int) -> list[Sample]:
    """Log-probabilities whose KL to the reference grows from sample to sample."""
    return [
        replace(
            s, old_logprobs=s.trajectory.logprobs, ref_logprobs=s.trajectory.logprobs - np.float32(number)
        )
        for number, s in enumerate(make_samples(num))
    ]


def mean_kl(samples: list[Sample]) -> float:
    """k1 over all trained tokens."""
    lengths = [int(s.trajectory.loss_mask.sum()) for s in samples]
    return float(np.average(np.arange(len(samples)), weights=lengths))


class Edge:
    """A batch in chunks, without channels."""

    def __init__(self, chunks: list[list[Sample]]) -> None:
        self.chunks = chunks

    def parts(self, worker: Any, world: World, **how: Any) -> Iterator[Part]:
        for number, samples in enumerate(self.chunks):
            outcome = Outcome(index=number, lengths=tuple(s.num_tokens for s in samples))
            chunk = Chunk.of([outcome], step=0, number=number, is_last=number + 1 == len(self.chunks))
            yield Part(chunk, chunk.keys_S, samples, world)


class Samples(dict[str, Sample]):
    def put(self, sample: Sample, *, weight: float, key: str) -> None:
        self[key] = sample


def critic(algorithm: Algorithm, **settings: Any) -> ValueTrainer:
    config = ValueTrainer.Config(model=MODEL, optimizer={"learning_rate": 1e-3}, **settings)
    return ValueTrainer(config, algorithm)


def test_figures_of_a_batch_in_chunks_are_those_of_the_whole_batch() -> None:
    """Not those of the last chunk, by which an adaptive coefficient would then be steered."""
    algorithm = Algorithm(AlgorithmConfig.model_validate({"type": "rloo", "kl": {**KL, "estimator": "k1"}}))
    samples, trainer = scored(6), critic(algorithm)
    advantages = Advantages(algorithm, trainer)
    for start, end in ((0, 1), (1, 4), (4, 4), (4, 6)):
        advantages.add(samples[start:end], is_last=end == 6)
    assert advantages.metrics["policy/kl_ref"] == pytest.approx(mean_kl(samples), rel=1e-6)
    trainer.close()


@pytest.mark.parametrize("whiten", [True, False], ids=["the batch together", "chunk by chunk"])
def test_the_critic_steers_the_kl_that_it_takes_from_the_reward(whiten: bool) -> None:
    settings = {"type": "ppo", "kl": KL, "advantage": {"whiten": whiten}}
    worker: CriticWorker = object.__new__(CriticWorker)
    worker.algorithm = Algorithm(AlgorithmConfig.model_validate(settings))
    worker.trainer = critic(worker.algorithm)
    samples, passed = scored(5), Samples()
    found = worker.train(Edge([samples[:3], samples[3:]]), passed)  # type: ignore[arg-type]
    assert len(passed) == 5 and found["policy/kl_ref"] == pytest.approx(mean_kl(samples), rel=1e-6)
    assert worker.algorithm.kl_controller.coefficient == pytest.approx(0.1 * (1 + 0.2 * 5 / 20))
    worker.trainer.close()


@pytest.mark.parametrize("name", ["ppo", "online_dpo", "reinforce_pp"])
def test_what_is_too_long_to_be_trained_on_bears_on_no_other_sample(name: str) -> None:
    """Its values and log-probabilities were never computed: no whitening counts them, and no pair has them."""
    algorithm = Algorithm(AlgorithmConfig.model_validate({"type": name}))
    samples = [
        replace(s, values=np.zeros(s.num_tokens, np.float32))
        for s in sorted(scored(4), key=lambda s: s.num_tokens)
    ]
    rewards = (0.0, 0.5, 1.0, 9.0)
    samples = [
        replace(s, trajectory=replace(s.trajectory, group_id="g", reward=reward))
        for s, reward in zip(samples, rewards, strict=True)
    ]
    limit = samples[-1].num_tokens - 1
    assert samples[-2].num_tokens <= limit

    def judged(given: list[Sample], **settings: Any) -> list[Sample]:
        trainer = critic(algorithm, **settings)
        found = Advantages(algorithm, trainer).add(given, is_last=True)
        trainer.close()
        assert found is not None
        return found

    *short, long = judged(samples, micro_batch_tokens=limit, on_too_long="skip")
    assert not long.advantages.any() and not long.trajectory.loss_mask.any()
    for one, other in zip(short, judged(samples[:-1]), strict=True):
        np.testing.assert_array_equal(one.advantages, other.advantages)
