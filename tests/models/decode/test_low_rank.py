"""Adapters beside joined projections: every row gets its own adapter's part and nobody else's."""

from __future__ import annotations

import torch
from torch import nn

from rill.models.decode.low_rank import LowRankBank
from rill.models.decode.structure import MLP, Layer, Projection
from rill.models.eager import AttentionCall, ScoreRule


def make_layer(generator: torch.Generator) -> tuple[Layer, dict[nn.Module, str]]:
    def linear(num_in: int, num_out: int) -> nn.Linear:
        module = nn.Linear(num_in, num_out, bias=False)
        with torch.no_grad():
            module.weight.copy_(torch.randn(num_out, num_in, generator=generator))
        return module

    modules = {
        name: linear(8, size) for name, size in (("q", 8), ("k", 4), ("v", 4), ("o", 8), ("g", 6), ("u", 6))
    }
    modules["d"] = linear(6, 8)

    def joined(*names: str) -> Projection:
        members = [modules[name] for name in names]
        return Projection(members, torch.cat([m.weight for m in members]), None)

    call = AttentionCall(num_heads=2, num_kv_heads=1, key_dim=4, value_dim=4, rule=ScoreRule(0.5))
    layer = Layer(
        index=0,
        call=call,
        qkv=joined("q", "k", "v"),
        out=joined("o"),
        head_norms=None,
        rope=0,
        turn=None,
        mlp=MLP(joined("g", "u"), joined("d"), is_gelu=False),
        before_attention=None,
        after_attention=None,
        before_mlp=None,
        after_mlp=None,
        residual_scale=1.0,
    )
    return layer, {module: name for name, module in modules.items()}


@torch.no_grad()
def test_rows_with_different_adapters_and_with_none_share_a_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    layer, names = make_layer(generator)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    adapters = {
        "a": {
            "q": (randn(2, 8), randn(8, 2)),
            "v": (randn(2, 8), randn(4, 2)),
            "d": (randn(2, 6), randn(8, 2)),
        },
        "b": {"v": (randn(3, 8), randn(4, 3)), "u": (randn(3, 8), randn(6, 3))},
    }
    bank = LowRankBank([layer], names, adapters)
    assert bank.covers_all
    chosen = ["a", None, "b", "a"]
    rows = bank.rows(torch.tensor([bank.number(n) if n else 0 for n in chosen], dtype=torch.int32))
    for projection in layer.projections:
        x = randn(4, projection.modules[0].in_features)
        found = rows.add_to(projection(x, nn.functional.linear), projection, x)
        for row, adapter in enumerate(chosen):
            parts = []
            for module in projection.modules:
                y = module(x[row])
                pair = adapters[adapter].get(names[module]) if adapter else None
                parts.append(y if pair is None else y + x[row] @ pair[0].T @ pair[1].T)
            torch.testing.assert_close(found[row], torch.cat(parts))


def test_an_adapter_of_another_module_is_not_covered() -> None:
    layer, names = make_layer(torch.Generator().manual_seed(0))
    bank = LowRankBank([layer], names, {"a": {"lm_head": (torch.zeros(1, 8), torch.zeros(9, 1))}})
    assert not bank.covers_all
