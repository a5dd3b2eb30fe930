"""Learning from pairs: RewardTrainer (Bradley–Terry) and PreferenceTrainer (DPO), on the same engine.

A pair is two answers to one prompt, one preferred. Both stay in one micro-batch. RewardTrainer reads one score at each
sequence's last token; the model it exports scores answers in an RLHF run. PreferenceTrainer trains a policy directly,
against the log-probabilities of a frozen reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rill.algorithms.preferences import BradleyTerryConfig, DPOConfig, bradley_terry_loss, dpo_loss
from rill.errors import ConfigError, InvalidSampleError
from rill.models.loading import DTYPES
from rill.training.batching import MicroBatch
from rill.training.engine_config import EngineConfig
from rill.training.module import VALUE_HEAD_FILE, PackedModule, ValueModule, load_packed_lm
from rill.training.packing import PackSequence
from rill.training.parallel import Rendezvous
from rill.training.trainer import Trainer
from rill.types import Bits, Floats, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole sequence, prompt included."""

    token_ids: TokenIds
    loss_mask: Bits
    """True on the answer's own tokens."""
    ref_logprobs: Floats | None = None
    """The reference's, aligned with token_ids; DPO needs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePair:
    id: str
    chosen: Answer
    rejected: Answer
    margin: float = 0.0
    """How much better the chosen one was rated, in reward units. 0: not known."""

    @property
    def num_tokens(self) -> int:
        return len(self.chosen.token_ids) + len(self.rejected.token_ids)


class PairTrainer(Trainer):
    """What both have in common: pairs to packs."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        rendezvous: Rendezvous | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        if config.context_parallel > 1:
            raise ConfigError("pair training reads whole sequences: set context_parallel = 1")
        super().__init__(config, rendezvous=rendezvous, device=device)

    def update(self, pairs: Sequence[PreferencePair]) -> dict[str, float]:
        """One optimizer step on this rank's share of a batch of pairs. Metrics are over all ranks."""
        self._begin()
        kept = self._fitting(self._checked(pairs), lambda p: p.num_tokens, lambda p: True)
        sequences = [_sequence(p.id, a) for p in kept for a in (p.chosen, p.rejected)]
        units = [(2 * i, 2 * i + 1) for i in range(len(kept))]
        for batch in self.batcher.micro_batches(sequences, units):
            self._train(batch, [kept[i // 2] for i in batch.indices[::2]])
        self._count(samples=len(kept))
        return self._apply()

    def _train(self, batch: MicroBatch, pairs: Sequence[PreferencePair]) -> None:
        raise AssertionError("a subclass has the loss")

    def _checked(self, pairs: Sequence[PreferencePair]) -> Sequence[PreferencePair]:
        for pair in pairs:
            for answer in (pair.chosen, pair.rejected):
                if len(answer.loss_mask) != len(answer.token_ids) or not answer.loss_mask[1:].any():
                    raise InvalidSampleError(
                        f"{pair.id}: an answer needs a loss mask of its length with a trained token"
                    )
                self.batcher.check_tokens(pair.id, answer.token_ids)
        return pairs


class RewardTrainer(PairTrainer):
    """A reward model: one score per sequence."""

    class Config(EngineConfig):
        loss: BradleyTerryConfig = BradleyTerryConfig()

    def __init__(
        self, config: Config, *, rendezvous: Rendezvous | None = None, device: str | torch.device = "cpu"
    ) -> None:
        super().__init__(config, rendezvous=rendezvous, device=device)
        self.config: RewardTrainer.Config = config

    def score(self, sequences: Sequence[TokenIds]) -> list[float]:
        """The model's reward of each whole sequence."""
        packed = []
        for index, tokens in enumerate(sequences):
            self.batcher.check_tokens(f"sequence {index}", tokens)
            packed.append(PackSequence(token_ids=tokens, wanted=np.zeros(len(tokens), dtype=np.bool_)))
        scores = [0.0] * len(packed)
        with torch.no_grad():
            for batch in self.batcher.micro_batches(packed):
                values = self.engine.module(batch.pack, per_sequence=True).tolist()
                for index, value in zip(batch.indices, values, strict=False):
                    scores[index] = value
        return scores

    def _make_module(self, config: EngineConfig, device: torch.device) -> PackedModule:
        lm = load_packed_lm(config.model, dtype=DTYPES[config.param_dtype], device=device)
        return ValueModule(lm, Path(config.model.path) / VALUE_HEAD_FILE if config.model.path else None)

    def _train(self, batch: MicroBatch, pairs: Sequence[PreferencePair]) -> None:
        scores_S = self.engine.module(batch.pack, per_sequence=True)
        if batch.is_idle:
            self.engine.backward(scores_S.sum() * 0.0)
            loss = bradley_terry_loss(scores_S.detach(), scores_S.detach(), self.config.loss)
        else:
            margins_P = torch.tensor([p.margin for p in pairs], device=scores_S.device)
            loss = bradley_terry_loss(scores_S[::2], scores_S[1::2], self.config.loss, margins_P)
            self.engine.backward(loss.numerator)
            self._count_pass(batch, loss.numerator, loss.denominator)
        self._tally.add_metrics(loss.metrics, is_idle=batch.is_idle)


class PreferenceTrainer(PairTrainer):
    """Direct preference optimisation of a policy."""

    class Config(EngineConfig):
        loss: DPOConfig = DPOConfig()

    def __init__(
        self, config: Config, *, rendezvous: Rendezvous | None = None, device: str | torch.device = "cpu"
    ) -> None:
        super().__init__(config, rendezvous=rendezvous, device=device)
        self.config: PreferenceTrainer.Config = config

    def logprobs(self, answers: Sequence[Answer]) -> list[Floats]:
        """log π of the answers' trained tokens, aligned with token_ids: what a reference computes once."""
        sequences = [_sequence(f"answer {i}", a) for i, a in enumerate(answers)]
        return self.batcher.per_token(sequences, lambda pack: self.engine.module(pack).logprobs_K)

    def _train(self, batch: MicroBatch, pairs: Sequence[PreferencePair]) -> None:
        logprobs_K = self.engine.module(batch.pack).logprobs_K
        if batch.is_idle:
            self.engine.backward(logprobs_K.sum() * 0.0)
            both = torch.zeros(1, dtype=torch.int64, device=logprobs_K.device)
            reference_K = logprobs_K.detach()
        else:
            both = torch.arange(0, 2 * len(pairs), 2, device=logprobs_K.device)
            reference_K = torch.from_numpy(_reference(pairs)).to(logprobs_K.device)
        loss = dpo_loss(
            logprobs_K.detach() if batch.is_idle else logprobs_K,
            reference_K,
            torch.ones_like(logprobs_K),
            batch.pack.seq_K,
            batch.pack.num_seqs,
            both,
            both if batch.is_idle else both + 1,
            self.config.loss,
        )
        if not batch.is_idle:
            self.engine.backward(loss.numerator)
            self._count_pass(batch, loss.numerator, loss.denominator)
        self._tally.add_metrics(loss.metrics, is_idle=batch.is_idle)


def _sequence(name: str, answer: Answer) -> PackSequence:
    wanted = answer.loss_mask.copy()
    wanted[:1] = False
    return PackSequence(token_ids=answer.token_ids, wanted=wanted, share_key=name)


def _reference(pairs: Sequence[PreferencePair]) -> Floats:
    parts: list[Floats] = []
    for pair in pairs:
        for answer in (pair.chosen, pair.rejected):
            if answer.ref_logprobs is None or len(answer.ref_logprobs) != len(answer.token_ids):
                raise InvalidSampleError(
                    f"{pair.id}: DPO needs the reference's log-probabilities: fill Answer.ref_logprobs with "
                    "PreferenceTrainer.logprobs before the first update, or from a ScoreModel"
                )
            parts.append(answer.ref_logprobs[_sequence(pair.id, answer).wanted])
    return np.concatenate(parts).astype(np.float32)
