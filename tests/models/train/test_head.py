"""The chunked head against plain log-softmax: values and exact gradients, whatever the chunking."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rill.models.train.head import chosen_logprobs

D, V, M, K = 16, 50, 12, 9


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(M, D, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=dtype).requires_grad_()
    bias = torch.randn(V, generator=generator, dtype=dtype).requires_grad_()
    source = torch.randint(0, M, (K,), generator=generator)
    target = torch.randint(0, V, (K,), generator=generator)
    return hidden, weight, bias, source, target


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor, source: Tensor, target: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax((hidden[source] @ weight.T + bias) * scale, dim=-1)
    return logp.gather(-1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("rows", [1, 4, K, 100])
@pytest.mark.parametrize("keep_bytes", [0, 1 << 20])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_values_and_gradients_are_those_of_log_softmax(
    rows: int, keep_bytes: int, with_entropy: bool
) -> None:
    mix = torch.randn(2, K, generator=torch.Generator().manual_seed(1))
    results = []
    for is_plain in (True, False):
        hidden, weight, bias, source, target = inputs(torch.float32)
        if is_plain:
            logprobs, entropy = plain(hidden, weight, bias, source, target, 0.7)
        else:
            logprobs, entropy = chosen_logprobs(
                hidden,
                weight,
                bias,
                source,
                target,
                scale=0.7,
                chunk_bytes=rows * 4 * V,
                keep_bytes=keep_bytes,
            )
        loss = (logprobs * mix[0]).sum() + ((entropy * mix[1]).sum() if with_entropy else 0.0)
        loss.backward()
        results.append((logprobs.detach(), entropy.detach(), hidden.grad, weight.grad, bias.grad))
    for found, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_no_logits_of_all_tokens_are_kept_for_the_backward_pass() -> None:
    hidden, weight, bias, source, target = inputs(torch.float32)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        chosen_logprobs(hidden, weight, bias, source, target, chunk_bytes=2 * 4 * V, keep_bytes=0)
    assert saved and all(n != K * V for n in saved)


def test_a_frozen_head_gets_no_gradient_and_no_tokens_is_no_error() -> None:
    hidden, weight, bias, source, target = inputs(torch.float32)
    weight.requires_grad_(False)
    bias.requires_grad_(False)
    chosen_logprobs(hidden, weight, bias, source, target)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None
    none = torch.zeros(0, dtype=torch.int64)
    weight.requires_grad_(True)
    logprobs, _ = chosen_logprobs(hidden, weight, None, none, none)
    logprobs.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.gpu
@pytest.mark.parametrize("keep_bytes", [0, 1 << 30])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_on_a_gpu_it_is_the_same_function(keep_bytes: int, with_entropy: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 64), torch.randn(9001, 64)
    source, target = torch.randint(0, 300, (211,)), torch.randint(0, 9001, (211,))
    grads = []
    for device in ("cpu", "cuda"):
        leaves = [x.to(device).requires_grad_() for x in (hidden, weight)]
        outputs = chosen_logprobs(
            *leaves, None, source.to(device), target.to(device),
            scale=0.7, chunk_bytes=100 * 4 * 9001, keep_bytes=keep_bytes,
        )  # fmt: skip
        loss = outputs[0].sum() + (outputs[1].square().sum() if with_entropy else 0.0)
        grads.append(
            [*(x.detach().cpu() for x in outputs), *(g.cpu() for g in torch.autograd.grad(loss, leaves))]
        )
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
