"""Several ranks give the gradient, the weights and the checkpoints of one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rill.data.pairs import Answer, PreferencePair
from rill.errors import ConfigError
from rill.training.parallel import Rendezvous, World
from rill.training.policy import PolicyTrainer
from rill.training.preference import PreferenceTrainer, RewardTrainer
from rill.training.value import ValueTrainer
from tests.training.tiny import MODEL, SHAPE, algorithm, config, make_samples, run_ranks, trainer


def gradient_on_a_rank(rendezvous: Rendezvous, arguments: dict[str, Any]) -> dict[str, Any]:
    """This rank's share of the batch, its gradient, one step, the weights after it, and a recompute."""
    t = trainer(rendezvous, **arguments["config"])
    samples = make_samples(arguments["count"])
    share = samples[: arguments["first"]] if t.world.data_rank == 0 else samples[arguments["first"] :]
    if t.world.data_size == 1:
        share = samples
    elif t.world.data_size > 2:
        share = samples[t.world.data_rank :: t.world.data_size]
    t.begin()
    t.accumulate(share)
    gradients = {name: g.numpy() for name, g in t.engine.gradients().items()}
    metrics = t.finish()
    weights = {name: w.float().numpy() for name, w in t.named_weights()}
    logprobs = t.logprobs(share)
    result = {"gradients": gradients, "metrics": metrics, "weights": weights, "logprobs": logprobs}
    if "save" in arguments:
        t.save(arguments["save"])
        t.update(share)  # while the files are written
        t.wait_saved()
        result["later"] = {name: w.float().numpy() for name, w in t.named_weights()}
    if "export" in arguments:
        t.export(arguments["export"])
    t.close()
    return result


def alone(count: int, **values: Any) -> dict[str, Any]:
    t = trainer(**values)
    t.begin()
    t.accumulate(make_samples(count))
    gradients = {name: g.numpy() for name, g in t.engine.gradients().items()}
    metrics = t.finish()
    weights = {name: w.float().numpy() for name, w in t.named_weights()}
    return {"gradients": gradients, "metrics": metrics, "weights": weights, "trainer": t}


def assert_same(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 2e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        scale = np.abs(value).max() + 1e-8
        assert np.abs(found[name] - value).max() <= tolerance * scale, name


def check(tmp_path: Path, world_size: int, arguments: dict[str, Any], tolerance: float = 2e-5) -> list[Any]:
    arguments = {"count": 8, "first": 5, **arguments}
    shared = {key: value for key, value in arguments["config"].items() if key in ("lora", "model")}
    reference = alone(arguments["count"], **shared)
    results = run_ranks(tmp_path, world_size, "tests.training.test_parallel:gradient_on_a_rank", arguments)
    for result in results:
        assert_same(result["gradients"], reference["gradients"], tolerance)
        assert result["metrics"]["loss"] == pytest.approx(reference["metrics"]["loss"], abs=1e-5)
        assert result["metrics"]["tokens"] == reference["metrics"]["tokens"]
        assert result["metrics"]["policy/entropy"] == pytest.approx(
            reference["metrics"]["policy/entropy"], rel=1e-4
        )
    return results


@pytest.mark.timeout(120)
def test_two_sharded_ranks_with_unequal_work_have_the_gradient_of_one_process(tmp_path: Path) -> None:
    # Rank 0 has 7 of 8 samples in several micro-batches; rank 1 runs idle packs to keep step.
    export, save = tmp_path / "export", tmp_path / "checkpoints"
    arguments = {
        "first": 7,
        "config": {"micro_batch_tokens": 40, "activation_checkpointing": "full"},
        "export": str(export),
        "save": str(save),
    }
    results = check(tmp_path, 2, arguments)
    assert_same(results[0]["weights"], results[1]["weights"], 0.0)

    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(export)
    # Sharded ranks wrote it; one process reads it and goes on as they did.
    t = trainer()
    assert t.load(save) == 1
    assert_same({n: w.numpy() for n, w in t.named_weights()}, results[0]["weights"], 0.0)
    t.update(make_samples(8))
    later = {n: w.numpy() for n, w in t.named_weights()}
    assert_same(later, results[0]["later"], 1e-3)
    assert_same({n: w.detach().numpy() for n, w in exported.named_parameters()}, results[0]["later"], 0.0)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_rows_that_do_not_divide_over_the_ranks_are_exported_whole(tmp_path: Path) -> None:
    results = check(tmp_path, 3, {"config": {}, "export": str(tmp_path / "export")})

    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert_same({n: w.detach().numpy() for n, w in exported.named_parameters()}, results[0]["weights"], 0.0)


@pytest.mark.timeout(120)
def test_sharded_eight_bit_state_is_read_by_one_process(tmp_path: Path) -> None:
    optimizer = {"type": "adamw8bit", "learning_rate": 1e-3}
    save = tmp_path / "checkpoints"
    arguments = {"config": {"optimizer": optimizer}, "save": str(save)}
    results = check(tmp_path, 2, arguments)
    t = trainer(optimizer=optimizer)
    assert t.load(save) == 1
    assert_same({n: w.numpy() for n, w in t.named_weights()}, results[0]["weights"], 0.0)
    t.update(make_samples(8))
    # The blocks of a whole matrix are not those of its shards: the moments differ by the codes' rounding.
    later = {n: w.numpy() for n, w in t.named_weights()}
    assert_same(later, results[0]["later"], 1e-2)


@pytest.mark.timeout(120)
def test_context_parallel_ranks_hold_slices_of_one_row(tmp_path: Path) -> None:
    results = check(tmp_path, 2, {"config": {"context_parallel": 2, "micro_batch_tokens": 64}})
    reference = alone(8)["trainer"].logprobs(make_samples(8))
    for found, wanted in zip(results[1]["logprobs"], reference, strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-4)


EXPERTS = {
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def with_experts(kind: str) -> dict[str, Any]:
    return {"shape": {**SHAPE, **EXPERTS[kind], "model_type": kind}}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "kind", ["qwen3_moe", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gpt_oss", "mixtral"))]
)
def test_ranks_that_divide_experts_have_the_gradient_of_one_process(tmp_path: Path, kind: str) -> None:
    config = {"model": with_experts(kind), "expert_parallel": 2, "activation_checkpointing": "full"}
    # Rank 1 has idle packs to run while rank 0 is at its second and third.
    results = check(tmp_path, 2, {"first": 7, "config": {**config, "micro_batch_tokens": 40}})
    assert_same(results[0]["weights"], results[1]["weights"], 0.0)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_groups_of_ranks_that_divide_experts_save_and_export_what_one_process_reads(
    tmp_path: Path,
) -> None:
    model, save = with_experts("qwen3_moe"), tmp_path / "checkpoints"
    arguments = {
        "config": {"model": model, "expert_parallel": 2},
        "export": str(tmp_path / "export"),
        "save": str(save),
    }
    results = check(tmp_path, 4, arguments)
    t = trainer(model=model)
    assert t.load(save) == 1
    assert_same({n: w.numpy() for n, w in t.named_weights()}, results[0]["weights"], 0.0)

    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert_same({n: w.detach().numpy() for n, w in exported.named_parameters()}, results[3]["later"], 0.0)


def test_experts_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ValueError, match="data ranks alone"):
        config(expert_parallel=2, tensor_parallel=2)
    with pytest.raises(ConfigError, match="groups of expert_parallel 2"):
        trainer(expert_parallel=2)  # one rank


@pytest.mark.timeout(120)
def test_tensor_parallel_ranks_hold_slices_of_matrices(tmp_path: Path) -> None:
    results = check(tmp_path, 2, {"config": {"tensor_parallel": 2}})
    assert_same(results[1]["weights"], alone(8)["weights"], 1e-2)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "model_type", ["qwen3", "gemma3_text", "phi3", "olmo2", "smollm3", "granite", "glm4"]
)
def test_tensor_parallel_carries_out_the_plan_of_every_family(tmp_path: Path, model_type: str) -> None:
    """Norms of single heads among them, whose gradient is a sum over the ranks."""
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "query_pre_attn_scalar": 16}
    shape = {**SHAPE, **special, "model_type": model_type}
    check(tmp_path, 2, {"config": {"tensor_parallel": 2, "model": {"shape": shape}}})


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"context_parallel": 2},
        {"tensor_parallel": 2},
        {"tensor_parallel": 2, "model": {"shape": {**SHAPE, "tie_word_embeddings": True}}},
        {"tree_packing": True, "micro_batch_tokens": 64},
        {"lora": {"rank": 2}},
    ],
    ids=str,
)
def test_four_ranks_in_any_arrangement_have_the_gradient_of_one_process(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    check(tmp_path, 4, {"config": values})


def pairs_and_values_on_a_rank(rendezvous: Rendezvous | None, steps: int) -> dict[str, Any]:
    """Two steps of a critic, a reward model and DPO, with all of the work read by rank 0."""
    settings: dict[str, Any] = {
        "model": MODEL,
        "micro_batch_tokens": 96,
        "optimizer": {"learning_rate": 1e-3},
    }
    samples = [
        dataclasses.replace(s, values=0.1 * s.advantages, returns=s.advantages) for s in make_samples(8)
    ]
    answers = [
        Answer(
            token_ids=s.trajectory.token_ids,
            loss_mask=s.trajectory.loss_mask,
            ref_logprobs=s.trajectory.logprobs,
        )
        for s in samples
    ]
    pairs = [
        PreferencePair(id=f"p{i}", chosen=a, rejected=b)
        for i, (a, b) in enumerate(zip(answers[::2], answers[1::2], strict=True))
    ]
    critic = ValueTrainer(ValueTrainer.Config(**settings), algorithm(), rendezvous=rendezvous)
    judge = RewardTrainer(RewardTrainer.Config(**settings))
    direct = PreferenceTrainer(PreferenceTrainer.Config(**settings))
    if critic.world.rank > 0:
        samples, pairs = [], []
    results = {
        "critic": [critic.update(samples) for _ in range(steps)],
        "judge": [judge.update(pairs) for _ in range(steps)] + [judge.evaluate(pairs)],
        "direct": [direct.update(pairs) for _ in range(steps)] + [direct.evaluate(pairs)],
    }
    critic.close()
    return results


def nan_on_one_rank(rendezvous: Rendezvous, losses: list[str]) -> list[dict[str, float]]:
    """A step of a policy with each loss, and of a critic: rank 1 has nothing but NaN, rank 0 nothing wrong."""
    settings = ValueTrainer.Config(model=MODEL, on_nonfinite="skip")
    critic = ValueTrainer(settings, algorithm(), rendezvous=rendezvous)
    samples = [
        dataclasses.replace(s, values=0.1 * s.advantages, returns=s.advantages)
        for s in make_samples(8)[critic.world.data_rank :: 2]
    ]
    if critic.world.data_rank == 1:
        nan = np.full_like(samples[0].advantages, np.nan)
        samples = [dataclasses.replace(samples[0], advantages=nan, returns=nan)]
    policies = [PolicyTrainer(config(on_nonfinite="skip"), algorithm(loss=loss)) for loss in losses]
    steps = [trainer.update(samples) for trainer in (critic, *policies)]
    critic.close()
    return steps


@pytest.mark.timeout(120)
def test_a_loss_that_one_rank_refuses_is_skipped_by_all(tmp_path: Path) -> None:
    function = "tests.training.test_parallel:nan_on_one_rank"
    for steps in run_ranks(tmp_path, 2, function, ["clip", "kl_cov"]):
        assert [step["skipped_steps"] for step in steps] == [1.0] * 3
        assert all(step["version"] == 0 for step in steps)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_critics_reward_models_and_dpo_on_two_ranks_take_the_steps_of_one(tmp_path: Path) -> None:
    alone = pairs_and_values_on_a_rank(None, 2)
    for ranked in run_ranks(tmp_path, 2, "tests.training.test_parallel:pairs_and_values_on_a_rank", 2):
        for name, steps in alone.items():
            for found, wanted in zip(ranked[name], steps, strict=True):
                for key in ("loss", "grad_norm", "eval/loss", "eval/accuracy", "eval/pairs", "samples"):
                    if key in wanted:
                        assert found[key] == pytest.approx(wanted[key], rel=2e-3, abs=1e-5), (name, key)


def test_ranks_that_cannot_be_cut_are_a_config_error() -> None:
    with pytest.raises(ConfigError, match="multiple of 2"):
        World.join(None, torch.device("cpu"), tensor_parallel=2)
