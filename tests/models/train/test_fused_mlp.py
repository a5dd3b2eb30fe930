"""MLPs with the activation inside their products: which are replaced, and that they compute the same."""

from __future__ import annotations

import copy
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Qwen2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from rill.models.train.fused_mlp import FusedMLP, fuse_mlps, has_fused_mlp, has_quack, keep_by_turns

needs_quack = pytest.mark.skipif(
    not (torch.cuda.is_available() and has_fused_mlp(torch.device("cuda"))), reason="rill[hopper] is not here"
)


def qwen(device: str = "cpu") -> Qwen2MLP:
    torch.manual_seed(0)
    return Qwen2MLP(Qwen2Config(hidden_size=256, intermediate_size=704)).to(device)


def test_only_those_that_compute_as_llamas_are_replaced() -> None:
    biased = qwen()
    biased.down_proj = nn.Linear(704, 256, bias=True)
    gelu = Gemma2MLP(Gemma2Config(hidden_size=64, intermediate_size=96))
    layers = nn.ModuleList([qwen(), biased, gelu, nn.Linear(4, 4), qwen()])
    assert fuse_mlps(layers) == 2
    assert not has_fused_mlp(torch.device("cpu"))


@pytest.mark.parametrize(
    ("place", "error"), [("__init__.py", "ImportError"), ("epilogue/library.py", "TypeError")]
)
def test_a_package_that_cannot_be_imported_is_named_and_done_without(
    place: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "quack"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "quack" / "epilogue").mkdir(parents=True)
    for name in ("__init__.py", "gemm_interface.py", "epilogue/__init__.py", "epilogue/library.py"):
        (tmp_path / "quack" / name).write_text(
            f'raise {error}("a library is not here")' if name == place else ""
        )
    monkeypatch.syspath_prepend(tmp_path)
    assert not has_quack()
    assert "a library is not here" in caplog.text and "quack-kernels[cu13]" in caplog.text


@pytest.fixture
def quack_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's two products by torch's operations."""

    def gemm_gated(x: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        both = x @ weight
        return both, nn.functional.silu(both[:, ::2]) * both[:, 1::2]

    def gemm_dgated(grad: Tensor, down: Tensor, both: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        gate, up, grad_inner = both[:, ::2], both[:, 1::2], grad @ down
        sigmoid = gate.sigmoid()
        grad_gate = grad_inner * up * sigmoid * (1 + gate * (1 - sigmoid))
        grad_both = torch.stack((grad_gate, grad_inner * gate * sigmoid), dim=2).flatten(1)
        return grad_both, gate * sigmoid * up

    config, interface = ModuleType("quack.gemm_config"), ModuleType("quack.gemm_interface")
    vars(config)["GemmConfig"] = dict
    vars(interface).update(gemm_gated=gemm_gated, gemm_dgated=gemm_dgated)
    for module in (config, interface):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def gradients(module: nn.Module, num_tokens: int) -> list[Tensor]:
    """What it gives, and what autograd leaves in each parameter and the input."""
    draw, like = torch.Generator().manual_seed(num_tokens), next(module.parameters())
    x, grad = (torch.randn(1, num_tokens, 256, generator=draw).to(like) for _ in range(2))
    x = x.detach().requires_grad_()
    out = module(x)
    out.backward(grad)
    grads = [tensor.grad for tensor in (x, *module.parameters())]
    return [out.detach(), *(grad.clone() for grad in grads if grad is not None)]


@pytest.mark.parametrize(
    "is_compiled",
    [
        False,
        pytest.param(
            True,
            marks=[
                pytest.mark.slow,
                pytest.mark.timeout(600),
                pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler has no compiler"),
            ],
        ),
    ],
)
def test_weights_that_lie_by_turns_are_the_same_weights_with_the_same_gradients(
    quack_on_cpu: None, is_compiled: bool
) -> None:
    plain, fused = qwen(), qwen()
    frozen = qwen().requires_grad_(False)
    fuse_mlps(nn.ModuleList([fused, frozen]))
    by_turns = copy.deepcopy(fused)
    keep_by_turns(nn.ModuleList([plain, by_turns, frozen]))
    assert isinstance(by_turns, FusedMLP) and isinstance(frozen, FusedMLP) and not frozen.gate_up
    (joined,) = by_turns.gate_up
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in by_turns.named_parameters()] == names
    for found, weight in zip(by_turns.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, weight)
    assert by_turns.up_proj.weight.untyped_storage().data_ptr() == joined.untyped_storage().data_ptr()
    if is_compiled:
        by_turns.compile(dynamic=True, fullgraph=True)
    for num_tokens in (30, 17):  # the second time gradients are added to those of the first
        wanted = gradients(plain, num_tokens)
        for module in (fused, by_turns):
            found_all = gradients(module, num_tokens)
            assert len(found_all) == len(wanted) == 5
            for found, value in zip(found_all, wanted, strict=True):
                torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-4)
        assert joined.grad is None
    with torch.no_grad():
        by_turns.gate_proj.weight.zero_()  # what is written into them is computed with
    assert not by_turns(torch.randn(1, 5, 256)).any()


def test_it_is_compiled_once_for_all_row_lengths(quack_on_cpu: None) -> None:
    from torch._dynamo.utils import counters

    fused = qwen()
    fuse_mlps(nn.ModuleList([fused]))
    torch._dynamo.reset()
    counters.clear()
    fused.compile(dynamic=True, backend="eager")
    for num_tokens in (5, 9, 30):
        fused(torch.randn(1, num_tokens, 256).requires_grad_()).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
@needs_quack
@pytest.mark.parametrize("lies_by_turns", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_it_is_the_mlp_forward_and_backward(is_compiled: bool, lies_by_turns: bool) -> None:
    exact, fused = qwen("cuda"), qwen("cuda").bfloat16()
    assert fuse_mlps(fused) == 1
    if lies_by_turns:
        keep_by_turns(nn.ModuleList([fused]))
    if is_compiled:
        fused.compile(dynamic=True)
    for num_tokens in (1000, 37):
        exact.zero_grad()
        fused.zero_grad()
        for a, b in zip(gradients(fused, num_tokens), gradients(exact, num_tokens), strict=True):
            assert (a.float() - b).norm() < 0.01 * b.norm()
