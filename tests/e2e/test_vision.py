"""A picture on its whole way, in one process: drawn, shown to an engine by an environment, trained on, published."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path

import numpy as np

from rill.algorithms import Algorithm, AlgorithmConfig
from rill.cli.scoring import episodes_of
from rill.data.tasks.shapes import ShapesDataset
from rill.envs.base import open_environment
from rill.envs.rewards.exact import ExactReward
from rill.envs.single_turn import SingleTurn
from rill.inference.native.engine import NativeEngine
from rill.models.loading import ModelConfig, load_tokenizer
from rill.models.pictures import load_pictures
from rill.training.policy import PolicyTrainer
from rill.types import PolicyVersion, Sample, SamplingParams, Trajectory

RECIPE = Path(__file__).parents[2] / "recipes" / "grpo_vlm.toml"


def test_what_was_shown_to_the_engine_is_what_is_trained_on() -> None:
    """Engine and trainer agree on every sampled token before and after a step on pictures, and the step teaches."""
    model = ModelConfig.model_validate(tomllib.loads(RECIPE.read_text())["model"])
    environment = open_environment(
        SingleTurn.Config(type="single_turn", reward=ExactReward.Config(type="exact")),
        load_tokenizer(model),
        load_pictures(model),
    )
    prompts = [ShapesDataset(ShapesDataset.Config(type="shapes"))[n] for n in range(4)]
    engine = NativeEngine(NativeEngine.Config(model=model, num_kv_blocks=128, block_size=8))
    algorithm = Algorithm(AlgorithmConfig(type="grpo", aggregation="token-mean"))
    trainer = PolicyTrainer(PolicyTrainer.Config(model=model), algorithm)
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True)

    def trajectories(seed: int) -> list[Trajectory]:
        groups = asyncio.run(episodes_of(engine, environment, prompts, sampling, 2, seed))
        return [sample for group in groups for episode in group for sample in episode.samples]

    try:
        for version in (1, 2):
            found = trajectories(seed=version)
            assert {t.pictures[0].data for t in found} == {p.messages[0].pictures[0] for p in prompts}
            samples = [Sample(trajectory=t, advantages=t.loss_mask.astype(np.float32)) for t in found]
            before = trainer.logprobs(samples, trained_only=True)
            for trajectory, logprobs in zip(found, before, strict=True):
                np.testing.assert_allclose(trajectory.logprobs, logprobs, atol=1e-4)
            trainer.update(samples)
            after = trainer.logprobs(samples, trained_only=True)
            assert sum(map(np.sum, after)) > sum(map(np.sum, before))
            engine.update_weights(list(trainer.named_weights()), PolicyVersion(version))
    finally:
        engine.close()
        trainer.close()
        environment.close()
