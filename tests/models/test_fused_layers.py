"""Fused CPU layers against Hugging Face's own modules, which are what runs where there is no compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rill.models.fused_layers
import rill.models.head
import rill.training.optim
from rill.models.cpu_training import TrainingKernels, load_training_kernels
from rill.models.loading import ModelConfig
from rill.training.policy import PolicyTrainer
from tests.training.tiny import SHAPE, algorithm, config, make_samples

pytestmark = pytest.mark.skipif(load_training_kernels() is None, reason="no C++ compiler")

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {"attention_bias": False},
    "mistral": {"sliding_window": 7},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"},
}


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it to go on as a machine without a compiler."""

    def remove() -> None:
        for module in (rill.models.fused_layers, rill.models.head, rill.training.optim):
            monkeypatch.setattr(module, "load_training_kernels", lambda: None)

    return remove


def make(name: str = "qwen2", **values: Any) -> PolicyTrainer:
    shape = {**SHAPE, "model_type": name, **ARCHITECTURES[name]}
    return PolicyTrainer(
        config(model=ModelConfig(shape=shape), **values), algorithm(entropy_coefficient=0.01)
    )


def gradients(trainer: PolicyTrainer) -> dict[str, Tensor]:
    trainer.accumulate(make_samples())
    return trainer.engine.gradients()


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest relative difference of a parameter's gradient."""
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).norm() / b[n].norm().clamp(min=1e-12)) for n in a if b[n].norm() > 1e-7)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_has_the_gradient_of_its_modules(name: str, without_kernels: Any) -> None:
    fused = gradients(make(name))
    without_kernels()
    assert distance(fused, gradients(make(name))) < 1e-5


@pytest.mark.parametrize(
    "values",
    [
        {"tree_packing": True},
        {"micro_batch_tokens": 64},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"lora": {"rank": 4}},
        {"lora": {"rank": 4, "targets": ("gate_proj", "q_proj")}},
    ],
)
def test_no_arrangement_changes_the_gradient(values: dict[str, Any], without_kernels: Any) -> None:
    fused = gradients(make(**values))
    without_kernels()
    assert distance(fused, gradients(make(**values))) < 1e-5


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bfloat16_is_as_near_to_float32_as_the_modules(name: str, without_kernels: Any) -> None:
    fused = gradients(make(name, compute_dtype="bfloat16"))
    without_kernels()
    exact = gradients(make(name))
    plain = gradients(make(name, compute_dtype="bfloat16"))
    assert distance(fused, exact) < 1.25 * distance(plain, exact)


def test_bfloat16_micro_batches_are_added_up_in_float32() -> None:
    whole = gradients(make(compute_dtype="bfloat16"))
    split = gradients(make(compute_dtype="bfloat16", micro_batch_tokens=32))
    assert all(g.dtype == torch.float32 for g in split.values())
    name = "lm.model.layers.0.mlp.down_proj.weight"
    assert float((whole[name] - split[name]).norm() / whole[name].norm()) < 1e-3


def test_the_number_of_threads_changes_no_bit_in_bfloat16() -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            trainer = make(compute_dtype="bfloat16")
            trainer.update(make_samples())
            results.append(gradients(trainer))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_optimizer_takes_torchs_step(dtype: str, without_kernels: Any) -> None:
    options: dict[str, Any] = {
        "compute_dtype": dtype,
        "optimizer": {"learning_rate": 1e-2, "weight_decay": 0.1},
    }
    fused, slots = make(**options), {}
    for trainer in (fused, make(**options)):
        for slot in trainer.engine.slots:
            slot.master.grad = torch.linspace(-1, 1, slot.master.numel()).view_as(slot.master)
        for _ in range(3):
            trainer.engine.optimizer.step(1e-2, 0.5)
        trainer.engine._publish_masters()
        slots[trainer] = {s.name: s.master for s in trainer.engine.slots}
        without_kernels()
    first, second = slots.values()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-5, atol=1e-7)


def kernels() -> TrainingKernels:
    found = load_training_kernels()
    assert found is not None
    return found


@pytest.mark.parametrize("rows", [1, 31, 64, 77, 700])
def test_products_of_any_number_of_rows_are_right(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    x, first, second, bias, addend = draw(rows, 64), draw(96, 64), draw(32, 64), draw(96), draw(rows, 96)
    grads = [draw(rows, 96), draw(rows, 32)]
    out = kernels().linear(x, first, bias, addend)
    rounded = (x.float() @ first.float().t() + bias.float()).bfloat16()
    torch.testing.assert_close(out, rounded + addend, rtol=2**-7, atol=2**-4)
    expected = grads[0].float() @ first.float() + grads[1].float() @ second.float()
    torch.testing.assert_close(
        kernels().input_grad(grads, [first, second]).float(), expected, rtol=2**-6, atol=2**-3
    )

    class Sums:
        total = torch.ones(96, 64)

        def sum_of(self, weight: Tensor) -> tuple[Tensor, bool]:
            return self.total, True

    sums = Sums()
    assert kernels().weight_grad(grads[0], x, first, sums) is None
    torch.testing.assert_close(sums.total, 1 + grads[0].float().t() @ x.float(), rtol=1e-5, atol=1e-3)


def test_long_sequences_and_windows_have_the_gradient_of_plain_attention() -> None:
    from rill.models.attention_packed import packed_attention
    from rill.models.packed_layout import Segment, build_layout

    torch.manual_seed(0)
    segments = [Segment(start=0, end=70), Segment(start=70, end=333), Segment(start=333, end=334)]
    layout = build_layout(segments, device=torch.device("cpu"), use_flash=False)
    rows, heads, kv_heads, dim = 334, 4, 2, 16
    cos, sin = torch.ones(rows, dim), torch.zeros(rows, dim)  # no rotation
    for window in (0, 50):
        q, k, v = (torch.randn(rows, n * dim, requires_grad=True) for n in (heads, kv_heads, kv_heads))
        out = rill.models.fused_layers._Attention.apply(kernels(), layout, 0.25, window, q, k, v, cos, sin)
        upstream = torch.randn(rows, heads * dim)
        got = torch.autograd.grad(out, (q, k, v), upstream)
        by_head = [x.view(1, rows, -1, dim).transpose(1, 2) for x in (q, k, v)]
        plain, _ = packed_attention(
            torch.nn.Module(), *by_head, None, scaling=0.25, packed=layout, sliding_window=window or None
        )
        torch.testing.assert_close(out, plain[0].flatten(1), rtol=1e-4, atol=1e-5)
        wanted = torch.autograd.grad(plain[0].flatten(1), (q, k, v), upstream)
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
