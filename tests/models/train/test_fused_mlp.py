"""MLPs with the activation inside their products: which are replaced, and that they compute the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Qwen2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from rill.models.train.fused_mlp import fuse_mlps, has_fused_mlp, has_quack

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


def test_a_package_that_cannot_be_imported_is_named_and_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "quack"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "quack").mkdir()
    (tmp_path / "quack" / "__init__.py").write_text('raise ImportError("libcute_dsl_runtime.so is not here")')
    monkeypatch.syspath_prepend(tmp_path)
    assert not has_quack()
    assert "libcute_dsl_runtime.so is not here" in caplog.text and "quack-kernels[cu13]" in caplog.text


@pytest.mark.gpu
@needs_quack
@pytest.mark.parametrize("is_compiled", [False, True])
def test_it_is_the_mlp_forward_and_backward(is_compiled: bool) -> None:
    exact, fused = qwen("cuda"), qwen("cuda").bfloat16()
    assert fuse_mlps(fused) == 1
    if is_compiled:
        fused.compile(dynamic=True)
    for num_tokens in (1000, 37):
        x, grad = (
            torch.randn(1, num_tokens, 256, device="cuda"),
            torch.randn(1, num_tokens, 256, device="cuda"),
        )

        def results(module: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
            x = x.clone().requires_grad_()
            out = module(x)
            return [out, *torch.autograd.grad(out, [x, *module.parameters()], grad)]

        wanted = results(exact, x, grad)
        found = results(fused, x.bfloat16(), grad.bfloat16())
        for a, b in zip(found, wanted, strict=True):
            assert (a.float() - b).norm() < 0.01 * b.norm()
