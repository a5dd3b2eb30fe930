"""A vision-language model is trained packed as its own modules would train it alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rill.algorithms import Algorithm, AlgorithmConfig
from rill.errors import InvalidSampleError, UserError
from rill.models.loading import ModelConfig, load_model
from rill.models.pictures import load_pictures
from rill.training.policy import PolicyTrainer
from rill.types import Picture, Sample, TokenIds, Trajectory
from tests.models.tiny_vision import SHAPES, noise, plain_logprobs, shown, tiny


def sample(name: str, ids: TokenIds, pictures: tuple[Picture, ...], group: str = "g") -> Sample:
    length = len(ids)
    mask = np.arange(length) >= length - 3
    return Sample(
        trajectory=Trajectory(
            id=name, group_id=group, prompt_id="p", token_ids=ids, logprobs=np.zeros(length, np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32), loss_mask=mask,
            turn_ids=np.zeros(length, np.int32), pictures=pictures,
        ),
        advantages=mask.astype(np.float32),
    )  # fmt: skip


def trainer_of(model: ModelConfig, device: str = "cpu", **settings: object) -> PolicyTrainer:
    algorithm = Algorithm(AlgorithmConfig(type="grpo", aggregation="token-mean"))
    config = PolicyTrainer.Config(model=model, max_grad_norm=0.0, **settings)  # type: ignore[arg-type]
    return PolicyTrainer(config, algorithm, device=device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tree_packing", [False, True])
@pytest.mark.parametrize("model_type", SHAPES)
def test_a_packed_row_has_the_gradient_of_the_plain_model(
    model_type: str, tree_packing: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two samples of one picture, one of another in the same group, one with two pictures and one without any."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # the patches' convolution, on a GPU
    model = tiny(model_type)
    reader = load_pictures(model)
    assert reader is not None
    one, other = noise(16, 24), noise(32, 16, seed=1)
    first, pictures = shown(reader, one)
    second = np.concatenate([first[:-2], np.array([50, 51], np.int32)])
    samples = [
        sample("a", first, pictures),
        sample("b", second, pictures),
        sample("c", *shown(reader, noise(16, 24, seed=2))),
        sample("d", *shown(reader, one, other), group="h"),
        sample("e", np.arange(60, 68, dtype=np.int32), (), group="i"),
    ]
    trainer = trainer_of(model, device, tree_packing=tree_packing)
    trainer.begin()
    trainer.accumulate(samples)
    found = trainer.engine.gradients()

    plain = load_model(model, dtype=torch.float32)
    for each in samples:
        trajectory = each.trajectory
        logprobs = plain_logprobs(plain, reader, trajectory.token_ids, trajectory.pictures)
        (-logprobs[-3:].sum()).backward()
    wanted = {f"lm.{name}": p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert any(".visual." in name for name in wanted)
    for name, gradient in wanted.items():
        tolerance = 2e-4 if device == "cpu" else 1e-2
        torch.testing.assert_close(found[name].cpu(), gradient, rtol=tolerance, atol=tolerance)


def test_a_frozen_tower_stays_as_it_is_and_is_published() -> None:
    model = tiny("qwen2_5_vl")
    reader = load_pictures(model)
    assert reader is not None
    trainer = trainer_of(model, freeze_vision=True)
    before = {name: tensor.clone() for name, tensor in trainer.named_weights()}
    trainer.update([sample("a", *shown(reader, noise(16, 16)))])
    after = dict(trainer.named_weights())
    assert before.keys() == after.keys()
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved and not any(".visual." in name for name in moved)
    assert any(".visual." in name for name in after)


def test_a_trainer_that_leaves_its_device_keeps_no_features_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen2_5_vl")
    reader = load_pictures(model)
    assert reader is not None
    trainer = trainer_of(model, freeze_vision=True)
    seen = [sample("a", *shown(reader, noise(16, 16)))]
    wanted = trainer.logprobs(seen)[0]
    engine = trainer.engine
    assert engine.module.vision is not None and engine.module.vision._kept
    for name in ("put", "drop"):
        monkeypatch.setattr(engine.shelf, name, lambda tensors: None)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(engine, "device", torch.device("cuda"))
        trainer.offload()
    assert not engine.module.vision._kept
    np.testing.assert_array_equal(trainer.logprobs(seen)[0], wanted)


def test_pictures_are_refused_by_a_model_without_a_tower() -> None:
    reader = load_pictures(tiny("qwen2_5_vl"))
    assert reader is not None
    shape = {"model_type": "qwen2", "vocab_size": 107, "hidden_size": 32, "intermediate_size": 64,
             "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    trainer = trainer_of(ModelConfig(shape=shape, tokenizer="chars"))
    with pytest.raises(InvalidSampleError, match="does not look at them"):
        trainer.update([sample("a", *shown(reader, noise(16, 16)))])


def test_a_vision_model_of_another_kind_is_refused_in_words() -> None:
    shape = {"model_type": "llava", "text_config": {"model_type": "llama"}}
    with pytest.raises(UserError, match="vision-language model that rill does not know"):
        trainer_of(ModelConfig(shape=shape, tokenizer="chars"))
