"""Experts: what the engine chose is what the trainer replays, on every kind of router."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rill.errors import UnsupportedError
from rill.inference.native.engine import NativeEngine
from rill.models.loading import ModelConfig, load_model
from rill.models.routing import UNKNOWN, Routing, expert_blocks
from rill.training.policy import PolicyTrainer
from rill.types import PolicyVersion, Sample, Trajectory
from tests.inference.native_models import prompts, request
from tests.training.tiny import algorithm

_BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": _BASE | {"num_experts": 8},
    "mixtral": _BASE | {"num_local_experts": 8},
    "gpt_oss": _BASE | {"num_local_experts": 8, "sliding_window": 8},
    "deepseek_v3": _BASE | _LATENT,
    "glm4_moe": _BASE | {"n_routed_experts": 8, "first_k_dense_replace": 0, "n_shared_experts": 1},
    "qwen2_moe": _BASE | {"num_experts": 8, "shared_expert_intermediate_size": 16},
}


def make_engine(name: str, **options: Any) -> NativeEngine:
    shape = SHAPES[name] | {"model_type": name}
    values = {
        "num_kv_blocks": 64,
        "max_num_seqs": 4,
        "routed_experts": True,
        "max_batched_tokens": 32,
    } | options
    return NativeEngine(NativeEngine.Config(model=ModelConfig(shape=shape), device="cpu", **values))


def make_trainer(name: str, **options: Any) -> PolicyTrainer:
    model = ModelConfig(shape=SHAPES[name] | {"model_type": name})
    values: dict[str, Any] = {"routing_replay": True, "optimizer": {"learning_rate": 1e-3}} | options
    return PolicyTrainer(PolicyTrainer.Config(model=model, **values), algorithm())


def rollouts(name: str, lengths: tuple[int, ...] = (5, 40, 17), **options: Any) -> list[Sample]:
    engine = make_engine(name, **options)
    try:
        inputs = prompts(lengths)
        done = engine.generate([request(i, p) for i, p in enumerate(inputs)], timeout_s=60)
        again = engine.generate([request(f"{i}b", p) for i, p in enumerate(inputs)], timeout_s=60)
    finally:
        engine.close()
    samples = []
    for index, (prompt, first, second) in enumerate(zip(inputs, done, again, strict=True)):
        # The second time most of the prompt came out of the prefix cache, and its experts with it.
        np.testing.assert_array_equal(first.routed_experts, second.routed_experts)
        tokens = np.concatenate([prompt, first.token_ids])
        sampled = np.arange(len(tokens)) >= len(prompt)
        padded = np.zeros(len(prompt))
        trajectory = Trajectory(
            id=str(index),
            group_id=str(index),
            prompt_id=str(index),
            token_ids=tokens,
            logprobs=np.concatenate([padded, first.logprobs]).astype(np.float32),
            versions=np.where(sampled, 0, -1).astype(np.int32),
            loss_mask=sampled,
            turn_ids=sampled.astype(np.int32),
            routed_experts=first.routed_experts,
        )
        samples.append(Sample(trajectory=trajectory, advantages=sampled.astype(np.float32)))
    return samples


@pytest.mark.parametrize("name", SHAPES)
def test_the_trainer_makes_the_engines_choices(name: str) -> None:
    samples = rollouts(name)
    trainer = make_trainer(name)
    num_layers = len(expert_blocks(trainer.engine.module.lm))
    for sample, found in zip(samples, trainer.logprobs(samples), strict=True):
        trajectory = sample.trajectory
        experts = trajectory.routed_experts
        assert experts is not None and experts.shape == (trajectory.num_tokens, num_layers, 2)
        assert (experts[:-1] >= 0).all() and (experts[-1] == UNKNOWN).all()
        mask = trajectory.loss_mask
        np.testing.assert_allclose(found[mask], trajectory.logprobs[mask], atol=1e-4)
    metrics = trainer.update(samples)
    assert metrics["router/agreement"] == pytest.approx(1.0)
    assert metrics["router/max_violation"] >= 0


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_other_choices_are_replayed_forward_and_backward(name: str) -> None:
    """With a router that has moved, replay keeps the old experts; the router still learns from their weights."""
    samples = rollouts(name)
    results = {}
    for kind in ("moved", "replayed", "checkpointed"):
        options = {"activation_checkpointing": "full"} if kind == "checkpointed" else {}
        trainer = make_trainer(name, routing_replay=kind != "moved", **options)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for block in expert_blocks(trainer.engine.module.lm):
                block.gate.weight.add_(torch.randn(block.gate.weight.shape, generator=generator))
        trainer.begin()
        trainer.accumulate(samples)
        gradients = trainer.engine.gradients()
        routers = [g for n, g in gradients.items() if n.endswith("mlp.gate.weight")]
        assert all(g.norm() > 0 for g in routers)
        metrics = trainer.finish()
        results[kind] = (gradients, metrics)
    assert results["replayed"][1]["router/agreement"] < 0.9
    moved, replayed, checkpointed = (results[kind][0] for kind in results)
    experts = [n for n in moved if "experts" in n]
    assert any((moved[n] - replayed[n]).norm() > 0.1 * moved[n].norm() for n in experts)
    for gradient_name, gradient in replayed.items():
        torch.testing.assert_close(checkpointed[gradient_name], gradient, rtol=1e-4, atol=1e-6)


def test_a_shared_prompt_is_replayed_once_and_changes_nothing() -> None:
    samples = [
        dataclasses.replace(s, trajectory=dataclasses.replace(s.trajectory, group_id="g"))
        for s in rollouts("qwen3_moe", (21, 21))
    ]
    first = samples[0].trajectory.token_ids[:21]
    for sample in samples:
        sample.trajectory.token_ids[:21] = first
        sample.trajectory.routed_experts[:21] = samples[0].trajectory.routed_experts[:21]  # type: ignore[index]
    plain = make_trainer("qwen3_moe").logprobs(samples)
    for a, b in zip(plain, make_trainer("qwen3_moe", tree_packing=True).logprobs(samples), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_preemption_and_short_caches_lose_no_choice() -> None:
    samples = rollouts("qwen3_moe", (30, 31, 32, 33), num_kv_blocks=12, block_size=8, max_num_seqs=4)
    assert all((s.trajectory.routed_experts[:-1] >= 0).all() for s in samples)  # type: ignore[index]


def test_models_without_experts_say_so() -> None:
    shape = {k: v for k, v in _BASE.items() if not k.startswith(("moe", "num_experts"))}
    config = NativeEngine.Config(
        model=ModelConfig(shape=shape | {"model_type": "llama"}), routed_experts=True, num_kv_blocks=8
    )
    with pytest.raises(UnsupportedError, match="no experts"):
        NativeEngine(config)


def test_the_busiest_expert_shows() -> None:
    trainer = make_trainer("qwen3_moe")
    routing = trainer.engine.module.routing
    assert isinstance(routing, Routing)
    scores = torch.zeros(6, 8)
    with routing.training_pass():
        for layer in range(routing.num_layers):
            routing.choose(layer, scores, torch.tensor([[0, 1]] * 6))  # 12 choices on 2 of 8 experts
    assert routing.finish_step(lambda sums: sums) == {"router/max_violation": pytest.approx(3.0)}
    assert routing.finish_step(lambda sums: sums) == {}


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_balance_loss_is_transformers_own(name: str, checkpointing: str) -> None:
    """Added to a loss of nothing, its gradient is that of load_balancing_loss_func, layer by layer."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    samples = [dataclasses.replace(s, advantages=0 * s.advantages) for s in rollouts(name, (40,))]
    options = {"routing_replay": False, "activation_checkpointing": checkpointing}
    trainer = make_trainer(name, router_balance_loss=0.5, **options)
    trainer.begin()
    trainer.accumulate(samples)
    found = trainer.engine.gradients()
    shape = SHAPES[name] | {"model_type": name}
    reference = load_model(ModelConfig(shape=shape), dtype=torch.float32, attention="eager")
    logits: list[torch.Tensor] = []
    for block in expert_blocks(reference):
        gate = block.gate if hasattr(block, "gate") else block.router
        bias = getattr(gate, "bias", None)
        gate.register_forward_pre_hook(
            lambda module, args, bias=bias: logits.append(
                torch.nn.functional.linear(args[0].reshape(-1, 32), module.weight, bias)
            )
        )
    with torch.enable_grad():
        for parameter in reference.parameters():
            parameter.requires_grad_(True)
        reference(torch.tensor(samples[0].trajectory.token_ids[None].astype(np.int64)))
        terms = [load_balancing_loss_func((layer,), 8, 2) for layer in logits]
        (0.5 * torch.stack(terms).mean()).backward()
    trained = int(samples[0].trajectory.loss_mask.sum())
    for key, parameter in reference.named_parameters():
        if parameter.grad is not None and parameter.grad.norm() > 0:
            torch.testing.assert_close(found[f"lm.{key}"] / trained, parameter.grad, rtol=2e-3, atol=1e-6)


def test_a_correction_bias_moves_towards_idle_experts() -> None:
    samples = rollouts("deepseek_v3")
    trainer = make_trainer("deepseek_v3", routing_replay=False, router_bias_rate=0.1)
    (block,) = expert_blocks(trainer.engine.module.lm)
    before = block.gate.e_score_correction_bias.clone()
    first = trainer.update(samples)["router/max_violation"]
    moved = block.gate.e_score_correction_bias - before
    assert set(moved.sign().tolist()) == {-1.0, 1.0}
    torch.testing.assert_close(moved.abs(), torch.full_like(moved, 0.1))
    for _ in range(6):
        last = trainer.update(samples)["router/max_violation"]
    assert last < first


def test_the_wrong_way_to_balance_names_the_right_one() -> None:
    with pytest.raises(UnsupportedError, match="router_bias_rate instead"):
        make_trainer("deepseek_v3", router_balance_loss=0.1)
    with pytest.raises(UnsupportedError, match="router_balance_loss instead"):
        make_trainer("mixtral", router_bias_rate=0.1)


def test_the_bias_of_a_router_travels_with_the_weights(tmp_path: Path) -> None:
    """It is a buffer, not a parameter: published, exported, and part of a checkpoint."""
    trainer = make_trainer("deepseek_v3")
    (block,) = expert_blocks(trainer.engine.module.lm)
    block.gate.e_score_correction_bias.copy_(torch.linspace(-1, 1, 8))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(dict(trainer.named_weights())[name], block.gate.e_score_correction_bias)
    exported = load_model(ModelConfig(path=str(trainer.export(tmp_path / "out"))), dtype=torch.float32)
    assert torch.equal(dict(exported.named_buffers())[name], block.gate.e_score_correction_bias)
    engine = make_engine("deepseek_v3")
    try:
        engine.update_weights(list(trainer.named_weights()), PolicyVersion(1))
        found = dict(engine._runner.model.named_buffers())[name]
        assert torch.equal(found, block.gate.e_score_correction_bias)
    finally:
        engine.close()
    trainer.save(tmp_path / "checkpoints")
    trainer.wait_saved()
    again = make_trainer("deepseek_v3")
    again.load(tmp_path / "checkpoints")
    assert torch.equal(dict(again.named_weights())[name], block.gate.e_score_correction_bias)
