"""The modules that an engine trains: a Hugging Face decoder that takes a Pack, with what is read off it.

The head is called inside forward, so that under FSDP2 its weight is whole exactly when it is needed. Parameter
names of the decoder are transformers' own behind the prefix `lm.`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rill.errors import UnsupportedError
from rill.models.eager import (
    TOLERANCES,
    LogitRule,
    check_tokens,
    decoder_blocks,
    difference,
    eager_logits,
    probe_model,
)
from rill.models.loading import ModelConfig, load_model
from rill.models.routing import Routing
from rill.models.train import attention_packed
from rill.models.train.head import CHUNK_BYTES, KEEP_BYTES, chosen_logprobs
from rill.models.train.packed_layout import Segment, build_layout, can_use_flash
from rill.models.train.products import GradientSums
from rill.models.value_head import ValueHead, hidden_width
from rill.training.packing import Pack

LM_PREFIX = "lm."
VALUE_HEAD_PREFIX = "value_head."
VALUE_HEAD_FILE = "value_head.safetensors"


class PackedModule(nn.Module):
    """Base: the decoder and how to run it on a pack."""

    lm: Any
    sums: GradientSums | None = None
    """Where the engine wants float32 gradients of the head added up; None: autograd's own place."""
    routing: Routing | None = None
    """Replays the experts that a pack brings; None: routers choose, and nothing is counted."""

    def hidden(self, pack: Pack) -> Tensor:
        """[M, D] last hidden states."""
        if self.routing is not None:
            self.routing.replay(pack.routed_experts_MLK)
        output = self.lm.base_model(
            input_ids=pack.input_ids_1M,
            position_ids=pack.position_ids_1M,
            use_cache=False,
            packed=pack.layout,
        )
        hidden_MD: Tensor = output.last_hidden_state[0]
        return hidden_MD

    def can_use_flash(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether the GPU's attention kernels compute what this architecture asks for."""
        return can_use_flash(device, dtype) and not attention_packed.changes_scores(self.lm)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's blocks."""
        return decoder_blocks(self.lm)

    @property
    def vocab_size(self) -> int:
        size: int = self.lm.config.get_text_config().vocab_size
        return size


Distill = Callable[[Tensor, Tensor], Tensor]
"""(hidden_KD, head_VD) → kl_K: called inside forward, where a sharded head is whole."""


class PolicyOutput(NamedTuple):
    """A tuple, because FSDP2 looks for gradients in the tuples that forward returns."""

    logprobs_K: Tensor
    entropy_K: Tensor
    kl_K: Tensor | None
    """KL to the teachers over the whole vocabulary; None without them."""


class PolicyModule(PackedModule):
    """Log-probabilities and entropies of a pack's wanted tokens."""

    def __init__(self, lm: Any, *, chunk_bytes: int = CHUNK_BYTES, keep_bytes: int = KEEP_BYTES) -> None:
        super().__init__()
        self.lm = lm
        rule = LogitRule.of(lm.config)
        self.logit_scale, self.logit_cap = rule.scale, rule.cap or None
        self.chunk_bytes = chunk_bytes
        self.keep_bytes = keep_bytes

    def forward(self, pack: Pack, temperature: float = 1.0, distill: Distill | None = None) -> PolicyOutput:
        head = self.lm.get_output_embeddings()
        hidden_MD = self.hidden(pack)
        logprobs_K, entropy_K = chosen_logprobs(
            hidden_MD,
            head.weight,
            head.bias,
            pack.source_K,
            pack.target_K,
            scale=self.logit_scale / temperature,
            cap=self.logit_cap,
            chunk_bytes=self.chunk_bytes,
            keep_bytes=self.keep_bytes,
            sums=self.sums,
        )
        kl_K = None if distill is None else distill(hidden_MD.index_select(0, pack.source_K), head.weight)
        return PolicyOutput(logprobs_K, entropy_K, kl_K)

    def predicting(self, pack: Pack) -> Tensor:
        """[K, D] last hidden states that predict the pack's wanted tokens."""
        return self.hidden(pack).index_select(0, pack.source_K)


class ValueModule(PackedModule):
    """One value per wanted token: V of the state before that token was chosen; or one score per sequence."""

    def __init__(self, lm: Any, head_file: Path | None = None) -> None:
        """`head_file` holds a trained head (see export); without one the head starts at zero."""
        super().__init__()
        self.lm = lm
        lm.set_output_embeddings(None)
        embedding = lm.get_input_embeddings().weight
        self.value_head = ValueHead(hidden_width(lm.config)).to(
            device=embedding.device, dtype=embedding.dtype
        )
        if head_file is not None and head_file.exists():
            self.value_head.load_state_dict(load_file(head_file))

    def forward(self, pack: Pack, per_sequence: bool = False) -> Tensor:
        hidden_MD = self.hidden(pack)
        values: Tensor = self.value_head(
            hidden_MD.index_select(0, pack.last_S if per_sequence else pack.source_K)
        )
        return values


def load_packed_lm(config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> Any:
    """The causal LM with packed attention, in training mode (no dropout: see below)."""
    attention_packed.register()
    lm: Any = load_model(config, dtype=dtype, device=device, attention=attention_packed.ATTENTION_NAME)
    try:
        probe_model(lm)
        _check_packing(lm)
    except UnsupportedError as error:
        raise UnsupportedError(f"the trainer cannot take {lm.config.model_type!r}: {error}") from error
    # Sampling has no dropout, so a policy trained with it would be another policy: eval mode for good.
    return lm.eval()


@torch.no_grad()
def _check_packing(lm: Any) -> None:
    """Two sequences in one row give the logits that the model's own eager modules give each of them alone."""
    ids_1M, device, cut = check_tokens(lm), lm.device, 5
    ends = (cut, ids_1M.shape[1])
    segments = [Segment(start=0, end=cut), Segment(start=cut, end=ends[1])]
    positions = torch.cat([torch.arange(cut), torch.arange(ends[1] - cut)]).to(device)
    layout = build_layout(
        segments,
        device=device,
        use_flash=can_use_flash(device, lm.dtype) and not attention_packed.changes_scores(lm),
    )
    hidden_MD = lm.base_model(
        input_ids=ids_1M, position_ids=positions[None], use_cache=False, packed=layout
    ).last_hidden_state[0]
    found = LogitRule.of(lm.config)(lm.get_output_embeddings()(hidden_MD)).float()
    wanted = torch.cat([eager_logits(lm, ids_1M[:, :cut]), eager_logits(lm, ids_1M[:, cut:])])
    distance, limit = difference(found, wanted), TOLERANCES[lm.dtype]
    if torch.isfinite(wanted).all() and not distance <= limit:
        raise UnsupportedError(
            f"packed in one row its logits differ from its own modules' by {distance:.1e} (limit {limit:.0e})"
        )


def has_plain_logits(lm: Any) -> bool:
    """Whether logits are the head's weight times the hidden state and no more."""
    has_bias = lm.get_output_embeddings().bias is not None
    return LogitRule.of(lm.config).is_plain and not has_bias
