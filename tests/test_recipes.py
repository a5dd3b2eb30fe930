"""Every recipe that comes with rill is small, says what it is, and means something to its workflow."""

from __future__ import annotations

from pathlib import Path

import pytest

from rill.config.files import load_recipe
from rill.config.resolve import resolve
from rill.runtime.device.accelerator import CUDA
from rill.runtime.device.device import Device
from rill.runtime.device.placement import resolve as resolve_placement
from rill.telemetry.run import Run
from rill.workflows import WORKFLOWS, recipe_schema
from rill.workflows.loop import StepReport
from rill.workflows.rl_config import RLConfig
from tests.forks import forked_agents

RECIPES = sorted((Path(__file__).resolve().parents[1] / "recipes").glob("*.toml"))
PROMISED = {
    "code", "dapo_math", "demo", "dpo_arithmetic", "grpo_arithmetic", "grpo_async", "grpo_gsm8k", "grpo_gsm8k_2x8_ray",
    "grpo_gsm8k_8gpu", "grpo_gsm8k_8gpu_async", "grpo_gym", "grpo_lora", "grpo_moe", "grpo_qwen2.5_1.5b_h200",
    "grpo_smollm2", "grpo_vlm", "lake", "nim", "ppo_arithmetic", "reverse_text", "reward_model_arithmetic", "rlhf_ppo",
    "robot", "sft_arithmetic", "sft_then_grpo", "vault",
}  # fmt: skip

TWO_STEPS = ("loop.steps=2", "cluster.threads=1")
SMALL_RL = (*TWO_STEPS, "sft.steps=2", "loop.prompts_per_step=4", "eval.num_prompts=4", "eval.every=0")
SMALL_SUPERVISED = (*TWO_STEPS, "loop.batch_size=4", "loop.eval_examples=4")
SMALL = {
    "demo": SMALL_RL,
    "grpo_arithmetic": (*SMALL_RL, "curriculum.index_limit=200"),
    "grpo_async": SMALL_RL,
    "grpo_moe": SMALL_RL,
    "grpo_vlm": SMALL_RL,
    "lake": SMALL_RL,
    "nim": (*TWO_STEPS, "sft.steps=2", "loop.prompts_per_step=4"),
    "ppo_arithmetic": SMALL_RL,
    "sft_arithmetic": SMALL_SUPERVISED,
}


def test_the_recipes_that_the_docs_promise_are_there() -> None:
    assert {path.stem for path in RECIPES} >= PROMISED


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_resolves_against_its_workflow(path: Path) -> None:
    recipe = load_recipe(path)
    resolve(recipe_schema(recipe.values, path.name), recipe.values, recipe.provenance)


@pytest.mark.parametrize(
    ("name", "nodes"),
    [("grpo_gsm8k", 1), ("grpo_gsm8k_8gpu", 1), ("grpo_gsm8k_8gpu_async", 1), ("grpo_gsm8k_2x8_ray", 2)],
)
def test_the_recipes_for_gpus_fit_on_the_machines_they_name(name: str, nodes: int) -> None:
    recipe = load_recipe(name)
    config = resolve(recipe_schema(recipe.values, name), recipe.values, recipe.provenance)
    assert isinstance(config, RLConfig)
    count = config.cluster.devices * nodes
    devices = [Device(kind=CUDA, index=i % 8, id=i, node_id=f"n{i * nodes // count}") for i in range(count)]
    used = {
        group: {
            d.id
            for seat in resolve_placement(getattr(config.placement, group), devices)
            for d in seat.devices
        }
        for group in ("rollout", "actor")
    }
    assert used["rollout"] | used["actor"] == set(range(count)), "no GPU stands idle"
    assert not used["rollout"] & used["actor"] or (config.loop.max_lag == 0 and config.cluster.colocate)
    assert config.loop.prompts_per_step % len(used["actor"]) == 0
    assert [each.name for each in config.eval.sets] == ["gsm8k"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_on_a_page_and_begins_with_what_it_is(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    assert lines[0].startswith("# ")


def run_small(name: str, root: Path, *changes: str) -> list[StepReport]:
    path = next(path for path in RECIPES if path.stem == name)
    recipe = load_recipe(path, changes)
    config = resolve(recipe_schema(recipe.values, name), recipe.values, recipe.provenance)
    reports: list[StepReport] = []
    run = Run.create(name, root=root)
    with forked_agents():
        WORKFLOWS.load(recipe.values["workflow"])(config, run, [reports.append]).run()
    assert reports[-1].step == 2
    assert (run.path / "model" / "config.json").exists()
    return reports


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_small_recipe_runs(name: str, tmp_path: Path) -> None:
    reports = run_small(name, tmp_path, *SMALL[name])
    if name == "grpo_arithmetic":
        assert "curriculum/chance_0" in reports[-1].metrics


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_recipes_that_start_from_others_run_one_after_another(tmp_path: Path) -> None:
    start = f"model.path={tmp_path / 'sft_arithmetic' / 'model'}"
    judge = f"reward_model.model.path={tmp_path / 'reward_model_arithmetic' / 'model'}"
    run_small("sft_arithmetic", tmp_path, *SMALL_SUPERVISED)
    run_small("dpo_arithmetic", tmp_path, start, *SMALL_SUPERVISED)
    run_small("reward_model_arithmetic", tmp_path, start, *SMALL_SUPERVISED)
    run_small("sft_then_grpo", tmp_path, start, *SMALL_RL)
    figures = run_small("rlhf_ppo", tmp_path, start, judge, *SMALL_RL)[-1].metrics
    assert figures["reward/mean"] == pytest.approx(figures["reward/model"])
