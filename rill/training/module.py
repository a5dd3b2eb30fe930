"""The modules that an engine trains: a Hugging Face decoder that takes a Pack, with what is read off it.

The head is called inside forward, so that under FSDP2 its weight is whole exactly when it is needed. Parameter
names of the decoder are transformers' own behind the prefix `lm.`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rill.errors import InvalidSampleError, UnsupportedError
from rill.models.eager import (
    TOLERANCES,
    LogitRule,
    check_tokens,
    decoder_blocks,
    decoder_of,
    difference,
    eager_logits,
    probe_model,
)
from rill.models.loading import ModelConfig, load_model, model_folder, reads_pictures
from rill.models.pictures import load_pictures, rope_positions
from rill.models.routing import Routing
from rill.models.train import attention_packed
from rill.models.train.head import CHUNK_BYTES, KEEP_BYTES, chosen_logprobs
from rill.models.train.packed_layout import PackedLayout, Segment, build_layout, can_use_flash
from rill.models.train.products import GradientSums
from rill.models.vision import PictureRows, PictureSpan, VisionTower, VisualRows, check_picture
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
    vision: VisionTower | None = None
    """Looks at a pack's pictures."""
    trains_vision = False

    def see(self, config: ModelConfig, *, is_frozen: bool) -> None:
        """Show it pictures, where it can look at them. `is_frozen`: the tower stays as it is."""
        if not reads_pictures(self.lm.config):
            return
        reader = load_pictures(config)
        assert reader is not None
        self.vision = VisionTower(self.lm, reader)
        if is_frozen:
            self.vision.tower.requires_grad_(False)
        self.trains_vision = any(p.requires_grad for p in self.vision.tower.parameters())

    def hidden(self, pack: Pack) -> Tensor:
        """[M, D] last hidden states."""
        if self.routing is not None:
            self.routing.replay(pack.routed_experts_MLK)
        hidden_MD = run_packed(
            self.lm, pack.input_ids_1M, pack.position_ids_1M, pack.layout, self._visual(pack)
        )
        if self.trains_vision and pack.pictures is None and torch.is_grad_enabled():
            assert self.vision is not None
            hidden_MD = (
                hidden_MD + self.vision.silent()
            )  # a sharded tower's gradients are summed over all ranks
        return hidden_MD

    def _visual(self, pack: Pack) -> VisualRows | None:
        if pack.pictures is None:
            return None
        if self.vision is None:
            raise InvalidSampleError(
                f"a sample has pictures, and {self.lm.config.model_type!r} does not look at them"
            )
        return (self.vision.trained_rows if self.trains_vision else self.vision.rows)(pack.pictures)

    def forget_pictures(self) -> None:
        """Their features: the weights change, or the device's memory is others'."""
        if self.vision is not None:
            self.vision.forget()

    def can_use_flash(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether the GPU's attention kernels compute what this architecture asks for."""
        return can_use_flash(device, dtype) and not attention_packed.changes_scores(self.lm)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's blocks."""
        return decoder_blocks(self.lm)

    def stored_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Those that a checkpoint of the decoder has, such as the bias of a router: neither trained nor sharded."""
        for prefix, module in self.lm.named_modules():
            for name, buffer in module.named_buffers(prefix=prefix, recurse=False):
                if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                    yield name, buffer.detach()

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


class ValueHead(nn.Module):
    """hidden → one float32 number. It starts at zero: a new critic predicts 0, a new reward model prefers nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden_KD: Tensor) -> Tensor:
        # In float32 whatever the decoder computes in: values of nearby states differ in few bits.
        return hidden_KD.float() @ self.weight[0].float() + self.bias.float()


class ValueModule(PackedModule):
    """One value per wanted token: V of the state before that token was chosen; or one score per sequence."""

    def __init__(self, lm: Any, head_file: Path | None = None) -> None:
        """`head_file` holds a trained head (see export); without one the head starts at zero."""
        super().__init__()
        self.lm = lm
        lm.set_output_embeddings(None)
        embedding = lm.get_input_embeddings().weight
        width: int = lm.config.get_text_config().hidden_size
        self.value_head = ValueHead(width).to(device=embedding.device, dtype=embedding.dtype)
        if head_file is not None and head_file.exists():
            self.value_head.load_state_dict(load_file(head_file))

    def forward(self, pack: Pack, per_sequence: bool = False) -> Tensor:
        hidden_MD = self.hidden(pack)
        values: Tensor = self.value_head(
            hidden_MD.index_select(0, pack.last_S if per_sequence else pack.source_K)
        )
        return values


def load_value_module(config: ModelConfig, device: torch.device) -> ValueModule:
    """To be trained: its head goes on from what was exported, if it was."""
    lm = load_packed_lm(config, dtype=torch.float32, device=device, needs_head=False)
    return ValueModule(lm, Path(model_folder(config.path)) / VALUE_HEAD_FILE if config.path else None)


def load_packed_lm(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, needs_head: bool = True
) -> Any:
    """The causal LM with packed attention, in training mode (no dropout: see below)."""
    attention_packed.register()
    name = attention_packed.ATTENTION_NAME
    lm: Any = load_model(config, dtype=dtype, device=device, attention=name, needs_head=needs_head)
    try:
        probe_model(lm)
        reader = load_pictures(config)
        _check_packing(lm, None if reader is None else VisionTower(lm, reader))
    except UnsupportedError as error:
        raise UnsupportedError(f"the trainer cannot take {lm.config.model_type!r}: {error}") from error
    # Sampling has no dropout, so a policy trained with it would be another policy: eval mode for good.
    return lm.eval()


def run_packed(
    lm: Any, ids_1M: Tensor, positions_1M: Tensor, layout: PackedLayout, visual: VisualRows | None
) -> Tensor:
    """[M, D] last hidden states of a row."""
    inputs = {"input_ids": ids_1M, "position_ids": positions_1M}
    if visual is not None:
        inputs = visual.decoder_inputs(lm.get_input_embeddings()(ids_1M[0]))
    hidden_1MD: Tensor = decoder_of(lm)(**inputs, use_cache=False, packed=layout).last_hidden_state
    return hidden_1MD.squeeze(0)  # and not [0], whose gradient is a copy among zeros


@torch.no_grad()
def _check_packing(lm: Any, vision: VisionTower | None) -> None:
    """Two sequences in one row give the logits that the model's own eager modules give each of them alone; the first
    with a picture, where there is a tower."""
    ids_1M, device, cut = check_tokens(lm), lm.device, 7
    length, visual, shown = ids_1M.shape[1], None, None
    segments = [Segment(start=0, end=cut), Segment(start=cut, end=length)]
    positions = torch.cat([torch.arange(cut), torch.arange(length - cut)]).to(device)
    if vision is not None:
        check = check_picture(lm, ids_1M[:, :cut])
        ids_1M = torch.cat([check.ids_1T, ids_1M[:, cut:]], dim=1)
        vision.remember(check)
        positions_3M = np.broadcast_to(positions.cpu().numpy(), (3, length)).copy()
        positions_3M[:, :cut] = rope_positions(cut, [check.picture])[0]
        span = PictureSpan(check.picture, check.picture.start, 0, check.picture.num_tokens)
        visual, shown = vision.rows(PictureRows([span], positions_3M)), check.arguments
    layout = build_layout(
        segments,
        device=device,
        use_flash=can_use_flash(device, lm.dtype) and not attention_packed.changes_scores(lm),
    )
    hidden_MD = run_packed(lm, ids_1M, positions[None], layout, visual)
    found = LogitRule.of(lm.config)(lm.get_output_embeddings()(hidden_MD)).float()
    wanted = torch.cat([eager_logits(lm, ids_1M[:, :cut], shown=shown), eager_logits(lm, ids_1M[:, cut:])])
    distance, limit = difference(found, wanted), TOLERANCES[lm.dtype]
    if torch.isfinite(wanted).all() and not distance <= limit:
        raise UnsupportedError(
            f"packed in one row its logits differ from its own modules' by {distance:.1e} (limit {limit:.0e})"
        )


def has_plain_logits(lm: Any) -> bool:
    """Whether logits are the head's weight times the hidden state and no more."""
    has_bias = lm.get_output_embeddings().bias is not None
    return LogitRule.of(lm.config).is_plain and not has_bias
