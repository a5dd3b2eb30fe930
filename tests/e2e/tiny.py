"""Whole runs of tiny.toml, in this process: the driver is the test, the workers are real."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from rill.cli.driver import carry_out
from rill.config.files import load_recipe
from rill.config.resolve import dump_config, resolve
from rill.telemetry.run import Run
from rill.workflows import WORKFLOWS, recipe_schema
from rill.workflows.loop import Observer
from rill.workflows.rl_config import RLConfig
from rill.workflows.steering import Pilot
from tests.forks import forked_agents

RECIPE = Path(__file__).with_name("tiny.toml")
STEPS = 8
INVARIANT = "rollout.engine.batch_invariant=true"
CORRECTED = "algorithm.correction=tis"
"""Makes the loss depend on the engine's log-probabilities, to the last bit."""
EXACT = (f"loop.steps={STEPS}", INVARIANT, CORRECTED, "trainer.num_mini_batches=2")
"""With two optimizer steps a batch, so that log π_old is a pass of its own."""


PPO = ("workflow=ppo", "algorithm.type=ppo")
"""Four models: actor, critic, reference and a rule."""


def resolved(recipe: Path, overrides: Sequence[str]) -> RLConfig:
    values = load_recipe(recipe, list(overrides))
    config = resolve(recipe_schema(values.values, str(values.path)), values.values, values.provenance)
    assert isinstance(config, RLConfig)
    return config


def start(
    root: Path, name: str, *overrides: str, observers: Sequence[Observer] = (), pilot: Pilot | None = None
) -> Run:
    config = resolved(RECIPE, overrides)
    run = Run.create(name, root=root, config_toml=dump_config(config))
    with run.running(), forked_agents():
        WORKFLOWS.load(config.workflow)(config, run, observers).run(pilot)
    return run


def resume(run: Run, *overrides: str, observers: Sequence[Observer] = ()) -> Run:
    config = resolved(run.config_path, overrides)
    run = Run.resume(run.path)
    with run.running(), forked_agents():
        WORKFLOWS.load(config.workflow)(config, run, observers).run()
    return run


def as_command(root: Path, name: str, *overrides: str) -> Run:
    """As `rill train` does it: with metrics, guards and a report."""
    config = resolved(RECIPE, overrides)
    run = Run.create(name, root=root, config_toml=dump_config(config))
    with forked_agents():
        carry_out(config, run)
    return run


def fingerprint(run: Run) -> str:
    """Of the bytes of the trained weights."""
    return hashlib.sha256((run.path / "model" / "model.safetensors").read_bytes()).hexdigest()[:16]
