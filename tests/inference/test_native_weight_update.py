"""New weights into an engine: all of them, each into its place, from sources that reuse their memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rill.errors import WeightSyncError
from rill.inference.native.weight_update import WeightTargets
from tests.inference.native_models import reference


@pytest.fixture
def tied() -> torch.nn.Module:
    model: torch.nn.Module = reference("llama-tied")
    return model


def fresh(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}


def test_tensors_of_an_iterator_may_share_one_buffer(tied: torch.nn.Module) -> None:
    """As those of a receiver do that takes one bucket after another."""
    wanted = fresh(tied)
    buffer = torch.empty(max(t.numel() for t in wanted.values()))

    def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in wanted.items():
            view = buffer[: tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            yield name, view

    WeightTargets(tied).copy(one_by_one(), partial=False)
    assert all(torch.equal(p, wanted[name]) for name, p in tied.named_parameters())


def test_a_list_is_copied_whole_in_another_dtype_too(tied: torch.nn.Module) -> None:
    wanted = {name: t.bfloat16() for name, t in fresh(tied).items()}
    WeightTargets(tied).copy(list(wanted.items()), partial=False)
    assert all(torch.equal(p, wanted[name].float()) for name, p in tied.named_parameters())


def test_a_tied_tensor_may_come_under_either_of_its_names(tied: torch.nn.Module) -> None:
    wanted = fresh(tied)
    wanted["lm_head.weight"] = wanted.pop("model.embed_tokens.weight")
    WeightTargets(tied).copy(list(wanted.items()), partial=False)
    assert torch.equal(tied.get_parameter("model.embed_tokens.weight"), wanted["lm_head.weight"])


def test_what_is_missing_unknown_or_misshapen_is_named(tied: torch.nn.Module) -> None:
    targets = WeightTargets(tied)
    whole = fresh(tied)
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(WeightSyncError, match=f"lacks 1 of .*{name}"):
        targets.copy([(n, t) for n, t in whole.items() if n != name], partial=False)
    targets.copy([(n, t) for n, t in whole.items() if n != name], partial=True)
    with pytest.raises(WeightSyncError, match="brings 'model.nothing'"):
        targets.copy([("model.nothing", whole[name])], partial=True)
    with pytest.raises(WeightSyncError, match="shape"):
        targets.copy([(name, whole[name][:1])], partial=True)
