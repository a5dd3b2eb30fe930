"""A model's own answer: what the engine and the trainer are held against when they load it.

No list says which architectures run. Both load any causal language model of transformers, look at how its modules call
attention (`probe_model`), and compare a few tokens with the model's own eager modules (`eager_logits`). What they
cannot compute is refused here, in words: silent differences are what this file is for.

Callers: rill.inference.native at load, rill.training.module at load, the sweep of tests/models/test_zoo.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rill.errors import UnsupportedError
from rill.models.loading import reads_pictures

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE_NAME = "rill_probe"
NUM_TOKENS = 12
"""Of the sequence that is compared."""
TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Relative difference of logits that rounding explains. What a wrong formula gives is larger."""

_IGNORED = frozenset(
    {
        "dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions", "cu_seq_lens_q",
        "output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch", "past_key_values",
        "past_key_value", "target_dtype", "layer_idx", "position_embeddings", "packed", "logits_to_keep",
    }
)  # fmt: skip
"""Arguments of transformers' attention interface that change nothing here: no dropout, no cache of its own."""
_KNOWN = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})


class ScoreRule(NamedTuple):
    """How one layer turns products of queries and keys into probabilities."""

    scale: float
    window: int = 0
    """Tokens a query sees, itself included; 0: all."""
    softcap: float = 0.0
    """c tanh(score / c) takes the place of each score; 0: off."""
    sinks_H: Tensor | None = None
    """A learnt score for each head that takes its part of the probability and has no value."""

    @staticmethod
    def of(
        key: Tensor,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **ignored: Any,
    ) -> ScoreRule:
        """From the arguments of transformers' attention interface. Others change nothing: `probe_model` has seen them
        when the model was loaded."""
        scale = key.shape[-1] ** -0.5 if scaling is None else scaling
        return ScoreRule(scale, sliding_window or 0, softcap or 0.0, s_aux)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """How one layer calls attention."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    rule: ScoreRule


@dataclass(frozen=True, slots=True)
class LogitRule:
    """What an architecture does to the product of its head and the last hidden state."""

    scale: float = 1.0
    cap: float = 0.0
    """c tanh(logit / c) comes first; 0: off."""

    @property
    def is_plain(self) -> bool:
        return self.scale == 1.0 and not self.cap

    def __call__(self, logits: Tensor) -> Tensor:
        """In float32, unless there is nothing to do."""
        if self.cap:
            logits = torch.tanh(logits.float() / self.cap) * self.cap
        return logits if self.scale == 1.0 else logits.float() * self.scale

    @staticmethod
    def of(model_config: Any) -> LogitRule:
        values = model_config.get_text_config().to_dict()
        scale = float(values.get("logit_scale") or 1.0) / float(values.get("logits_scaling") or 1.0)
        scale *= float(values.get("lm_head_multiplier") or 1.0)
        return LogitRule(scale, float(values.get("final_logit_softcapping") or 0.0))


def refuse_unknown(name: str, attention_mask: Tensor | None, arguments: dict[str, Any]) -> None:
    """Of one attention call: an argument that this code does not know may change its scores."""
    unknown = [
        key for key, value in arguments.items()
        if key not in _IGNORED and key not in _KNOWN and value is not None and value is not False
    ]  # fmt: skip
    if attention_mask is not None:
        unknown.append("a mask or position bias of its own")
    if unknown:
        raise UnsupportedError(f"{name} passes {', '.join(sorted(unknown))} to attention")


def num_layers(model: Any) -> int:
    return int(model.config.get_text_config().num_hidden_layers)


@dataclass(frozen=True, slots=True)
class Probe:
    """What a model was seen to do with two tokens."""

    calls: list[AttentionCall]
    """By layer."""
    queries: list[tuple[Tensor, Tensor]]
    """By layer: what went into its attention [T, E], and the queries [T, H, D] that came of it."""
    ids_1T: Tensor
    embedded_TE: Tensor
    """What went into the first block."""


@torch.no_grad()
def probe_model(model: PreTrainedModel) -> Probe:
    """UnsupportedError where a layer does something else than causal softmax over keys and values."""
    _refuse_kinds(model)
    calls: dict[int, AttentionCall] = {}
    queries: dict[int, Tensor] = {}

    def record(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        refuse_unknown(type(module).__name__, attention_mask, arguments)
        is_causal = arguments.get("is_causal")
        if is_causal is False or (is_causal is None and not getattr(module, "is_causal", True)):
            raise UnsupportedError(f"{type(module).__name__} attends in both directions")
        if query.shape[2] != key.shape[2]:
            raise UnsupportedError(f"{type(module).__name__} attends to other tokens than its own")
        layer: Any = module.layer_idx
        if layer in calls:
            raise UnsupportedError(f"layer {layer} attends twice")
        queries[layer] = query[0].transpose(0, 1)
        calls[layer] = AttentionCall(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            rule=ScoreRule.of(key, **arguments),
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    from transformers import AttentionInterface

    AttentionInterface.register(PROBE_NAME, record)
    ids = check_tokens(model)[:, :2]
    entered: dict[nn.Module, Tensor] = {}

    def enter(module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        entered[module] = (positional[0] if positional else named["hidden_states"])[0]

    blocks = decoder_blocks(model)
    attentions: list[Any] = [block.self_attn for block in blocks if hasattr(block, "self_attn")]
    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in (blocks[0], *attentions)]
    try:
        with attention_of(model, PROBE_NAME):
            positions = torch.arange(2, device=ids.device)[None]
            model.base_model(input_ids=ids, position_ids=positions, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    missing = [i for i in range(num_layers(model)) if i not in calls]
    if missing:
        raise UnsupportedError(f"layers {missing} keep another state than keys and values")
    _check_windows(model, calls)
    made = [(entered[module], queries[layer]) for layer, module in enumerate(attentions)]
    return Probe([calls[i] for i in range(len(calls))], made, ids, entered[blocks[0]])


@torch.no_grad()
def eager_logits(
    model: PreTrainedModel, ids_1T: Tensor, first: int = 0, shown: Mapping[str, Tensor] | None = None
) -> Tensor:
    """[T, V] in float32, with the model's own eager attention; the first token stands at position `first`. `shown`:
    what pictures add to the model's arguments."""
    arguments = dict(shown or {})
    if first:
        arguments["position_ids"] = torch.arange(first, first + ids_1T.shape[1], device=ids_1T.device)[None]
    with attention_of(model, "eager"):
        logits: Tensor = model(input_ids=ids_1T, use_cache=False, **arguments).logits[0]
    return logits.float()


def check_tokens(model: PreTrainedModel) -> Tensor:
    """[1, NUM_TOKENS] token ids, the same for every call."""
    vocab = int(model.config.get_text_config().vocab_size)
    drawn = torch.randint(0, vocab, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
    return drawn.to(model.device)


def decoder_of(model: Any) -> Any:
    """The module from embeddings to last hidden states: a vision-language model has it beside its tower."""
    return model.base_model.language_model if reads_pictures(model.config) else model.base_model


def decoder_blocks(model: Any) -> nn.ModuleList:
    """The one list of as many modules as the decoder has layers: `layers` in most architectures, `h` in GPT-2's."""
    found = [
        child
        for child in decoder_of(model).modules()
        if isinstance(child, nn.ModuleList) and len(child) == num_layers(model)
    ]
    if not found:
        raise UnsupportedError(f"it has no list of {num_layers(model)} blocks")
    return found[0]


def difference(found_TV: Tensor, wanted_TV: Tensor) -> float:
    """‖found − wanted‖ / ‖wanted − its rows' means‖: of logits, whose mean changes no probability."""
    spread = wanted_TV - wanted_TV.mean(-1, keepdim=True)
    return float((found_TV.float() - wanted_TV).norm() / spread.norm().clamp(min=1e-6))


@contextmanager
def attention_of(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model's modules compute attention by `name` until the block ends."""
    configs: list[Any] = [model.config, *(getattr(model.config, key) for key in model.config.sub_configs)]
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, kept in zip(configs, before, strict=True):
            config._attn_implementation_internal = kept


def _refuse_kinds(model: PreTrainedModel) -> None:
    """What can be seen without calling anything."""
    config: Any = model.config.get_text_config()
    if not model._supports_attention_backend:
        raise UnsupportedError("transformers computes its attention inside the model")
    if model.config.is_encoder_decoder:
        raise UnsupportedError("it is an encoder with a decoder")
    if any("indexer" in name for name, _ in model.named_modules()):
        raise UnsupportedError("it attends to keys that an index selects")
    kinds = set(config.to_dict().get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise UnsupportedError(f"it has layers of {', '.join(sorted(kinds))}")


def _check_windows(model: PreTrainedModel, calls: dict[int, AttentionCall]) -> None:
    """A window that a model has in its mask alone would be lost beyond the few tokens of the check."""
    config: Any = model.config.get_text_config()
    values = config.to_dict()
    kinds = values.get("layer_types") or ["full_attention"] * len(calls)
    for layer, kind in enumerate(kinds[: len(calls)]):
        if kind == "sliding_attention" and not calls[layer].rule.window and values.get("sliding_window"):
            raise UnsupportedError(f"layer {layer} has its sliding window in the mask alone")
    if values.get("attention_chunk_size"):
        raise UnsupportedError("it attends within chunks (attention_chunk_size)")
