"""What a decoder is made of, read off a model's own modules: an architecture is data.

`read_structure` looks at the parts of every layer, tries norms, activations and rotary embeddings on a few numbers,
takes scale, window, cap and sinks from the model's own attention calls (rill.models.eager.probe) and gives up, with
None, at the first thing that rill.models.decode.decoder does not compute. Nothing goes by the name of an architecture:
a model that looks like one of these and is not is found out when its logits are compared with its modules'
(rill.inference.native.self_check), and is run through its modules then.

    h ─► norm? ─► qkv ─► [q, k norm] rope ─► attend ─► out ─► norm? ─► (+) ─► norm? ─► mlp or experts ─► norm? ─► (+) ─►

Parameters stay the modules' own. q/k/v and gate/up projections share one storage each where that is allowed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rill.models.eager import AttentionCall, Probe, decoder_blocks, decoder_of
from rill.models.linear import ReplacedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose angles depend on the position alone."""
NORM_ORDERS = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ("input_layernorm", None, None, None),
)
"""Names of the norms before and after attention, before and after the MLP. With the first alone both halves of a block
read what it gives, side by side."""

LinearFn = Callable[[Tensor, Tensor, Tensor | None], Tensor]
RopeTable = tuple[Tensor, Tensor]
"""Cosines and sines [max_len, D] in the model's precision."""


@dataclass(slots=True)
class Norm:
    weight: Tensor
    eps: float
    is_offset: bool
    """Multiplies by 1 + weight, without rounding in between."""
    is_centered: bool = False
    """The mean is taken off first: a LayerNorm without bias."""
    is_last: bool = False
    """What it gives goes to the head, which reads no numbers of 8 bits."""


class HeadNorms(NamedTuple):
    """Of queries and keys, before they are turned: of each head, or of all together."""

    query: Norm
    key: Norm


@dataclass(frozen=True, slots=True)
class Turn:
    """A rotary embedding other than the kernels' own, which pairs the halves of whole heads: of neighbours, or of a
    part of each head. Axes: L position, N token, H head, D head dimension."""

    cos_LD: Tensor
    sin_LD: Tensor
    """Negative where a pair's other number is taken off."""
    partner_D: Tensor

    def __call__(self, heads_NHD: Tensor, positions_N: Tensor) -> None:
        """In place."""
        cos, sin = (table.index_select(0, positions_N)[:, None] for table in (self.cos_LD, self.sin_LD))
        heads_NHD.copy_(heads_NHD * cos + heads_NHD[..., self.partner_D] * sin)


@dataclass(slots=True)
class Projection:
    """One or more Linear modules with the same input, as one product."""

    modules: list[nn.Linear]
    weight: Tensor | None
    """Their weights in one storage; None where they may not be moved, and are multiplied one by one."""
    bias: Tensor | None
    scales: Tensor | None = None
    """Of a weight of 8 bits, one for each row; those of one module are the same."""

    def __call__(self, x: Tensor, linear: LinearFn) -> Tensor:
        if self.weight is not None:
            return linear(x, self.weight, self.bias)
        return torch.cat([linear(x, m.weight, m.bias) for m in self.modules], dim=-1)


@dataclass(slots=True)
class MLP:
    gate_up: Projection
    down: Projection
    is_gelu: bool


@dataclass(slots=True)
class Layer:
    index: int
    call: AttentionCall
    qkv: Projection
    out: Projection
    head_norms: HeadNorms | None
    rope: RopeTable
    turn: Turn | None
    """Done before, where no table does it."""
    mlp: MLP | nn.Module
    """A module, experts for instance, is called as it is."""
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    residual_scale: float

    @property
    def turns_in_kernel(self) -> bool:
        """Heads are normed and turned as kernels do it: each by itself, not of Gemma's kind, halves of whole heads."""
        if self.head_norms is None or self.turn is not None:
            return self.turn is None
        norm = self.head_norms.query
        return not norm.is_offset and not norm.is_centered and len(norm.weight) == self.call.key_dim

    @property
    def is_parallel(self) -> bool:
        """The MLP reads what attention reads."""
        return self.before_mlp is None and self.after_attention is None and self.after_mlp is None

    @property
    def projections(self) -> list[Projection]:
        both = [self.mlp.gate_up, self.mlp.down] if isinstance(self.mlp, MLP) else []
        return [self.qkv, self.out, *both]


@dataclass(slots=True)
class Structure:
    embed: nn.Module
    embed_scale: float
    layers: list[Layer]
    final_norm: Norm
    rotary: nn.Module

    def turned_by(self, positions_3N: Tensor) -> RopeTable:
        """Cosines and sines [N, D] of tokens that stand in time, height and width."""
        cos, sin = self.rotary(self.final_norm.weight, positions_3N[:, None])
        return cos[0].contiguous(), sin[0].contiguous()

    @property
    def is_dense(self) -> bool:
        """No layer calls a module, whose sums may depend on the batch."""
        return all(isinstance(layer.mlp, MLP) for layer in self.layers)


@torch.no_grad()
def read_structure(model: PreTrainedModel, probe: Probe, *, fuse: bool, max_len: int) -> Structure | None:
    """None when the model has anything that the decoder does not compute. `fuse`: parameters may be moved."""
    backbone: Any = decoder_of(model)
    blocks = decoder_blocks(model)
    final_norm = _norm(getattr(backbone, "norm", None))
    embed = model.get_input_embeddings()
    scale = _embed_scale(embed, probe)
    tables = _RopeTables(backbone, model.config.get_text_config(), embed.weight.data, max_len)
    if final_norm is None or scale is None or len(blocks) != len(probe.calls) or not tables.is_plain:
        return None
    layers: list[Layer] = []
    for index, block in enumerate(blocks):
        layer = _layer(index, block, probe, tables, fuse=fuse)
        if layer is None:
            return None
        layers.append(layer)
    final_norm.is_last = True
    return Structure(embed, scale, layers, final_norm, backbone.rotary_emb)


def _layer(index: int, block: Any, probe: Probe, tables: _RopeTables, *, fuse: bool) -> Layer | None:
    call = probe.calls[index]
    parts = {name for name, child in block.named_children() if next(child.parameters(), None) is not None}
    order = next((o for o in NORM_ORDERS if parts == {"self_attn", "mlp"} | {n for n in o if n}), None)
    if order is None or call.key_dim != call.value_dim or call.key_dim % 2:
        return None
    norms = [None if name is None else _norm(getattr(block, name)) for name in order]
    attention = block.self_attn
    qkv = _projection(attention, (("q_proj", "k_proj", "v_proj"), ("qkv_proj",)), fuse=fuse)
    out = _projection(attention, (("o_proj",),), fuse=fuse)
    q_norm, k_norm = (_norm(getattr(attention, name, None)) for name in ("q_norm", "k_norm"))
    known = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm", "sinks"}
    if (
        qkv is None
        or out is None
        or any(name and norm is None for name, norm in zip(order, norms, strict=True))
        or any(name.split(".")[0] not in known for name, _ in attention.named_parameters())
        or (q_norm is None) != (k_norm is None)
        or (hasattr(attention, "q_norm") and q_norm is None)
    ):
        return None
    entered_TE, turned_THD = probe.queries[index]
    plain_THD = _plain_queries(attention, qkv, entered_TE, turned_THD.shape)
    found = tables.find(index, plain_THD, turned_THD)
    if found is None:
        return None
    before_attention, after_attention, before_mlp, after_mlp = norms
    return Layer(
        index=index,
        call=call,
        qkv=qkv,
        out=out,
        head_norms=None if q_norm is None or k_norm is None else HeadNorms(q_norm, k_norm),
        rope=found[0],
        turn=found[1],
        mlp=read_mlp(block.mlp, fuse=fuse),
        before_attention=before_attention,
        after_attention=after_attention,
        before_mlp=before_mlp,
        after_mlp=after_mlp,
        residual_scale=float(getattr(block, "residual_multiplier", 1.0)),
    )


def _plain_queries(attention: Any, qkv: Projection, entered_TE: Tensor, shape: torch.Size) -> Tensor:
    """[T, H, D], before they are turned."""
    plain = qkv(entered_TE, torch.nn.functional.linear)[:, : shape[1] * shape[2]]
    norm = getattr(attention, "q_norm", None)
    if norm is None:
        return plain.view(shape)
    normed: Tensor = norm(plain.view(shape) if len(norm.weight) == shape[2] else plain)
    return normed.view(shape)


def read_mlp(module: nn.Module, *, fuse: bool) -> MLP | nn.Module:
    """The module itself where it is not a gated MLP."""
    gate_up = _projection(module, (("gate_proj", "up_proj"), ("gate_up_proj",)), fuse=fuse)
    down = _projection(module, (("down_proj",),), fuse=fuse)
    activation: Any = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    names = {name.split(".")[0] for name, _ in module.named_parameters()}
    if gate_up is None or down is None or activation is None or len(names) != len(gate_up.modules) + 1:
        return module
    if any(m.bias is not None for m in (*gate_up.modules, *down.modules)):
        return module
    x = torch.linspace(-4.0, 4.0, 33)
    kinds = [torch.nn.functional.silu(x), torch.nn.functional.gelu(x, approximate="tanh")]
    for is_gelu, wanted in enumerate(kinds):
        if torch.allclose(activation(x), wanted, atol=1e-6):
            return MLP(gate_up, down, bool(is_gelu))
    return module


def _norm(module: Any) -> Norm | None:
    """None where it is neither a root-mean-square norm nor a LayerNorm without bias: found by trying."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or eps is None or weight.ndim != 1 or getattr(module, "bias", None) is not None:
        return None
    x = (1.0 + torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0))).to(weight)
    found = module(x).float()
    for is_offset, is_centered in ((False, False), (True, False), (False, True)):
        x32 = x.float() - x.float().mean(-1, keepdim=True) if is_centered else x.float()
        scaled = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        wanted = scaled * (weight.float() + is_offset)
        if (found - wanted).norm() <= 0.01 * wanted.norm().clamp(min=1e-6):
            return Norm(weight, float(eps), is_offset, is_centered)
    return None


def _embed_scale(embed: nn.Module, probe: Probe) -> float | None:
    """What the embedding is multiplied with before the first layer; None where something else is done to it."""
    plain = embed(probe.ids_1T)[0].float()
    wanted = probe.embedded_TE.float()
    if plain.shape != wanted.shape:
        return None
    scale = float((plain * wanted).sum() / plain.square().sum().clamp(min=1e-12))
    return scale if (plain * scale - wanted).norm() <= 0.01 * wanted.norm() else None


class _RopeTables:
    """How layers turn their queries and keys. Tables are for the kernels, which turn the halves of whole heads: one for
    each kind of layer, and one that does not turn at all."""

    def __init__(self, backbone: Any, config: Any, like: Tensor, max_len: int) -> None:
        self._module: Any = getattr(backbone, "rotary_emb", None)
        values = config.to_dict()
        self._kinds = values.get("layer_types")
        rope = values.get("rope_parameters") or {}
        several = [v for v in rope.values() if isinstance(v, dict)] or [rope]
        self.is_plain = self._module is not None and all(
            r.get("rope_type", "default") in ROPE_TYPES for r in several
        )
        self._takes_kind = (
            self._module is not None and "layer_type" in inspect.signature(self._module.forward).parameters
        )
        self._like, self._max_len = like, max_len
        self._pairs = functools.cache(self._make_pairs)
        self._tables = functools.cache(self._make_table)
        self._turns = functools.cache(lambda kind, dim, way: _turn(*self._pairs(kind), dim, way))

    def find(self, layer: int, plain_THD: Tensor, turned_THD: Tensor) -> tuple[RopeTable, Turn | None] | None:
        """The table, and what is done before it: found by trying what the layer made of its queries."""
        kind = self._kinds[layer] if self._takes_kind and self._kinds else ""
        cos_LP, sin_LP = self._pairs(kind)
        dim, size = plain_THD.shape[2], cos_LP.shape[1]
        if 2 * size > dim:
            return None
        errors: dict[str, float] = {}
        for way in ("off", "halves", "neighbours"):
            found_THD = plain_THD.clone()
            _turn(cos_LP[:2], sin_LP[:2], dim, way)(found_THD, torch.arange(2, device=cos_LP.device))
            errors[way] = float((found_THD - turned_THD).norm() / turned_THD.norm().clamp(min=1e-6))
        way = min(errors, key=lambda each: errors[each])
        if errors[way] > 0.02:
            return None
        if way == "halves" and 2 * size == dim:
            return self._tables(dim, kind), None
        return self._tables(dim, None), None if way == "off" else self._turns(kind, dim, way)

    def _make_table(self, dim: int, kind: str | None) -> RopeTable:
        """None: it does not turn."""
        if kind is None:
            return self._like.new_ones(self._max_len, dim), self._like.new_zeros(self._max_len, dim)
        cos_LP, sin_LP = self._pairs(kind)
        return torch.cat((cos_LP, cos_LP), -1), torch.cat((sin_LP, sin_LP), -1)

    def _make_pairs(self, kind: str) -> tuple[Tensor, Tensor]:
        """Cosines and sines, one for each pair of numbers that turn together."""
        positions = torch.arange(self._max_len, device=self._like.device)[None]
        if hasattr(self._module, "mrope_section"):  # letters stand alike in time, height and width
            positions = positions.expand(3, 1, -1)
        cos, sin = self._module(self._like, positions, kind) if kind else self._module(self._like, positions)
        half = cos.shape[-1] // 2
        if torch.equal(cos[..., :half], cos[..., half:]):  # twice each, one half after the other
            return cos[0, :, :half], sin[0, :, :half]
        if torch.equal(cos[..., ::2], cos[..., 1::2]):  # twice each, side by side
            return cos[0, :, ::2], sin[0, :, ::2]
        return cos[0], sin[0]


def _turn(cos_LP: Tensor, sin_LP: Tensor, dim: int, way: str) -> Turn:
    """Of the first numbers of a head, of which the halves or neighbours are pairs; the others stay."""
    cos_LD, sin_LD = cos_LP.new_ones(len(cos_LP), dim), sin_LP.new_zeros(len(sin_LP), dim)
    partner_D = torch.arange(dim, device=cos_LP.device)
    size = 0 if way == "off" else cos_LP.shape[1]
    step, ahead = (1, size) if way == "halves" else (2, 1)
    if size:
        first_P = step * partner_D[:size]
        second_P = first_P + ahead
        cos_LD[:, first_P], cos_LD[:, second_P] = cos_LP, cos_LP
        sin_LD[:, first_P], sin_LD[:, second_P] = -sin_LP, sin_LP
        partner_D[first_P], partner_D[second_P] = second_P, first_P
    return Turn(cos_LD, sin_LD, partner_D)


def _projection(parent: Any, choices: tuple[tuple[str, ...], ...], *, fuse: bool) -> Projection | None:
    for names in choices:
        modules: list[Any] = [getattr(parent, name, None) for name in names]
        if all(type(m) is nn.Linear or isinstance(m, ReplacedLinear) for m in modules):
            if len(modules) == 1:
                return Projection(modules, modules[0].weight, modules[0].bias)
            has_bias = [m.bias is not None for m in modules]
            if not fuse or any(has_bias) != all(has_bias):
                return Projection(modules, None, None)
            bias = _share([m.bias for m in modules]) if has_bias[0] else None
            return Projection(modules, _share([m.weight for m in modules]), bias)
    return None


def _share(parameters: list[Tensor]) -> Tensor:
    """One tensor over all of them, stacked by rows; each parameter becomes a view of its part."""
    joined = torch.cat([p.data for p in parameters])
    start = 0
    for parameter in parameters:
        end = start + parameter.shape[0]
        parameter.data = joined[start:end]
        start = end
    return joined
