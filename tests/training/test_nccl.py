"""Every collective of a sharded trainer over nccl, on a mesh of the one GPU there is."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from rill.models.loading import ModelConfig
from rill.models.train.attention_packed import gather_row
from rill.training.module import load_packed_lm
from rill.training.parallel import World, apply_tensor_parallel, full, local
from rill.training.policy import PolicyTrainer
from rill.training.score import ScoreModel
from rill.training.staging import Staging, StateCopy
from tests.training.test_gpu import WIDE, gpu_trainer
from tests.training.tiny import config, make_samples

pytestmark = pytest.mark.gpu


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    dist.init_process_group(
        "nccl",
        init_method=f"file://{tmp_path}/rendezvous",
        rank=0,
        world_size=1,
        timeout=datetime.timedelta(seconds=60),
    )
    mesh = init_device_mesh("cuda", (1, 1, 1), mesh_dim_names=("data", "context", "tensor"))
    yield World(mesh, torch.device("cuda"))
    dist.destroy_process_group()


def sharded_trainer(world: World, monkeypatch: pytest.MonkeyPatch, **values: Any) -> PolicyTrainer:
    with monkeypatch.context() as patch:
        patch.setattr(World, "join", lambda *args, **kwargs: world)
        return gpu_trainer(**values)


def test_a_sharded_trainer_trains_saves_and_exports_like_one_that_is_not(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    values: dict[str, Any] = {"micro_batch_tokens": 64, "max_grad_norm": 0.01}
    alone, sharded = gpu_trainer(**values), sharded_trainer(world, monkeypatch, **values)
    assert all(isinstance(s.template, DTensor) for s in sharded.engine.slots)
    for t in (alone, sharded):
        t.begin()
        t.accumulate(make_samples())
    wanted, found = alone.engine.gradients(), sharded.engine.gradients()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 0.02 * gradient.norm() + 1e-6, name
    metrics = [t.finish() for t in (alone, sharded)]
    assert metrics[1]["grad_norm"] == pytest.approx(metrics[0]["grad_norm"], rel=0.02)

    staged = StateCopy(Staging(sharded.engine.device), sharded.engine.state()).run()
    assert all(local(value).device.type == "cpu" for value in staged.values())
    sharded.save(tmp_path / "checkpoints")
    saved = {name: weight.clone() for name, weight in sharded.named_weights()}
    sharded.update(make_samples(seed=1))
    sharded.wait_saved()
    again = sharded_trainer(world, monkeypatch, **values)
    assert again.load(tmp_path / "checkpoints") == 1
    for name, weight in again.named_weights():
        assert torch.equal(weight, saved[name]), name
    assert again.update(make_samples(seed=1))["version"] == 2
    for a, b in zip(again.engine.slots, sharded.engine.slots, strict=True):
        assert torch.equal(a.master, b.master), a.name

    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(sharded.export(tmp_path / "model"), dtype="auto")
    for name, weight in sharded.named_weights():
        assert torch.equal(exported.get_parameter(name), weight.cpu()), name


@pytest.mark.parametrize("kind", ["adamw8bit", "muon"])
def test_other_optimizers_step_on_shards(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    values = {"optimizer": {"type": kind, "learning_rate": 1e-3}}
    t = sharded_trainer(world, monkeypatch, **values)
    t.update(make_samples())
    t.offload()
    if not t.rests_on_host:
        t.onload()
    t.save(tmp_path)
    t.onload()
    t.wait_saved()
    again = sharded_trainer(world, monkeypatch, **values)
    again.load(tmp_path)
    assert t.update(make_samples(seed=1))["loss"] == again.update(make_samples(seed=1))["loss"]
    for a, b in zip(t.engine.slots, again.engine.slots, strict=True):
        assert torch.equal(a.master, b.master), a.name


def test_a_row_is_gathered_and_its_gradient_scattered(world: World) -> None:
    assert world.mesh is not None
    key, value = (torch.randn(1, 2, 6, 8, device="cuda", requires_grad=True) for _ in range(2))
    whole_key, whole_value = gather_row(key, value, world.mesh.get_group("context"))
    assert torch.equal(whole_key, key) and torch.equal(whole_value, value)
    grads = torch.autograd.grad((whole_key * 2 + whole_value * 3).sum(), (key, value))
    assert (grads[0] == 2.0).all() and (grads[1] == 3.0).all()


def test_matrices_are_cut_by_the_models_plan(world: World) -> None:
    cut, whole = (
        load_packed_lm(config(model={"shape": WIDE}).model, dtype=torch.float32, device=world.device)
        for _ in range(2)
    )
    apply_tensor_parallel(cut, world)
    matrix = cut.base_model.layers[0].mlp.up_proj.weight
    assert isinstance(matrix, DTensor)
    x = torch.randn(1, 5, WIDE["hidden_size"], device="cuda")
    np.testing.assert_allclose(
        full(cut.base_model.layers[0].mlp(x)).detach().cpu(),
        whole.base_model.layers[0].mlp(x).detach().cpu(),
        atol=1e-5,
    )


def test_host_tensors_are_summed_over_nccl(world: World) -> None:
    """Batch advantages are computed on the host, whatever the ranks talk by."""
    for values in (torch.tensor([1.0, 2.0], dtype=torch.float64), torch.ones(3, device="cuda")):
        found = world.sum_over_data(values.clone())
        assert found.device == values.device and torch.equal(found, values)


def test_a_frozen_model_cut_over_ranks_scores_as_a_whole_one(world: World) -> None:
    settings: dict[str, Any] = {"model": ModelConfig(shape=WIDE), "dtype": "bfloat16"}
    whole = ScoreModel(ScoreModel.Config(**settings), device="cuda")
    cut = ScoreModel(ScoreModel.Config(**settings, shard=True), device="cuda", world=world)
    assert all(isinstance(p, DTensor) for p in cut.module.parameters())
    samples = make_samples()
    for a, b in zip(cut.logprobs(samples), whole.logprobs(samples), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-2)
    cut.offload()
    cut.onload()
    cut.load_weights((n, p.detach().clone()) for n, p in whole.module.lm.named_parameters())
    for a, b in zip(cut.logprobs(samples), whole.logprobs(samples), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-2)
