"""Learning from pairs: RewardTrainer (Bradley–Terry) and PreferenceTrainer (DPO), on the same engine.

A pair is two answers to one prompt, one preferred. Both stay in one micro-batch. RewardTrainer reads one score at each
sequence's last token; the model it exports scores answers in an RLHF run. PreferenceTrainer trains a policy directly,
against the log-probabilities of a frozen reference.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rill.algorithms.base import LossSum
from rill.algorithms.preferences import BradleyTerryConfig, DPOConfig, bradley_terry_loss, dpo_loss
from rill.errors import ConfigError, InvalidSampleError
from rill.models.loading import DTYPES
from rill.training.batching import MicroBatch, Tally
from rill.training.engine_config import EngineConfig
from rill.training.module import VALUE_HEAD_FILE, PackedModule, ValueModule, load_packed_lm
from rill.training.packing import PackSequence
from rill.training.parallel import Rendezvous
from rill.training.score import sequence_scores
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
        """One optimizer step on a batch of pairs, of which this rank brings its part. Metrics are over all ranks."""
        self._forget()
        with self._working():
            self._accumulate(pairs)
        return self._apply()

    def _accumulate(self, pairs: Sequence[PreferencePair]) -> None:
        own = self._fitting(self._checked(pairs), lambda p: p.num_tokens, lambda p: True)
        kept = self._dealt_out(own, lambda p: [len(p.chosen.token_ids), len(p.rejected.token_ids)])
        for batch, inside in self._passes(kept):
            outputs = self._outputs(batch)
            loss = self._guarded(functools.partial(self._loss, batch, inside, outputs), outputs)
            if batch.is_idle:
                self.engine.backward(outputs.sum() * 0.0)
            else:
                self.engine.backward(loss.numerator)
                self._count_pass(batch, loss.numerator, loss.denominator)
            self._tally.add_metrics(loss.metrics, is_idle=batch.is_idle)
        self._count(samples=len(kept))

    def evaluate(self, pairs: Sequence[PreferencePair]) -> dict[str, float]:
        """The loss's metrics on held-out pairs over all ranks; nothing is trained."""
        tally = Tally()
        kept = [pair for pair in self._checked(pairs) if self.keeps(pair.num_tokens)]
        tally.add(pairs=float(len(kept)))
        with torch.no_grad():
            for batch, inside in self._passes(kept):
                loss = self._loss(batch, inside, self._outputs(batch))
                tally.add_metrics(loss.metrics, is_idle=batch.is_idle)
        sums, metrics, _ = tally.reduce(self.world)
        found = {f"eval/{name.rpartition('/')[2]}": value for name, value in metrics.items()}
        return {**found, "eval/pairs": sums["pairs"]}

    def _passes(
        self, pairs: Sequence[PreferencePair]
    ) -> Iterator[tuple[MicroBatch, Sequence[PreferencePair]]]:
        sequences = [answer_sequence(a, p.id) for p in pairs for a in (p.chosen, p.rejected)]
        units = [(2 * i, 2 * i + 1) for i in range(len(pairs))]
        for batch in self.batcher.micro_batches(sequences, units):
            yield batch, [pairs[i // 2] for i in batch.indices[::2]]

    def _outputs(self, batch: MicroBatch) -> torch.Tensor:
        """What the loss of one pass is made from; every parameter is reached through it."""
        raise AssertionError("a subclass has the model's outputs")

    def _loss(self, batch: MicroBatch, pairs: Sequence[PreferencePair], outputs: torch.Tensor) -> LossSum:
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
        return sequence_scores(self.engine.module, self.batcher, sequences)

    def _make_module(self, config: EngineConfig, device: torch.device) -> PackedModule:
        lm = load_packed_lm(config.model, dtype=DTYPES[config.param_dtype], device=device)
        return ValueModule(lm, Path(config.model.path) / VALUE_HEAD_FILE if config.model.path else None)

    def _outputs(self, batch: MicroBatch) -> torch.Tensor:
        scores_S: torch.Tensor = self.engine.module(batch.pack, per_sequence=True)
        return scores_S

    def _loss(self, batch: MicroBatch, pairs: Sequence[PreferencePair], outputs: torch.Tensor) -> LossSum:
        scores_S = outputs
        if batch.is_idle:
            return bradley_terry_loss(scores_S, scores_S, self.config.loss)
        margins_P = torch.tensor([p.margin for p in pairs], device=scores_S.device)
        return bradley_terry_loss(scores_S[::2], scores_S[1::2], self.config.loss, margins_P)


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
        sequences = [answer_sequence(a) for a in answers]
        return self.batcher.per_token(sequences, lambda pack: self.engine.module(pack).logprobs_K)

    def _outputs(self, batch: MicroBatch) -> torch.Tensor:
        logprobs_K: torch.Tensor = self.engine.module(batch.pack).logprobs_K
        return logprobs_K

    def _loss(self, batch: MicroBatch, pairs: Sequence[PreferencePair], outputs: torch.Tensor) -> LossSum:
        logprobs_K = outputs
        if batch.is_idle:  # one sequence, compared with itself
            chosen_P = rejected_P = torch.zeros(1, dtype=torch.int64, device=logprobs_K.device)
            reference_K = logprobs_K.detach()
        else:
            chosen_P = torch.arange(0, 2 * len(pairs), 2, device=logprobs_K.device)
            rejected_P = chosen_P + 1
            reference_K = torch.from_numpy(_reference(pairs)).to(logprobs_K.device)
        return dpo_loss(
            logprobs_K,
            reference_K,
            torch.ones_like(logprobs_K),
            batch.pack.seq_K,
            batch.pack.num_seqs,
            chosen_P,
            rejected_P,
            self.config.loss,
        )


def answer_sequence(answer: Answer, share_key: str | None = None) -> PackSequence:
    """What is packed of an answer: its own tokens are wanted."""
    wanted = answer.loss_mask.copy()
    wanted[:1] = False
    return PackSequence(token_ids=answer.token_ids, wanted=wanted, share_key=share_key)


def _reference(pairs: Sequence[PreferencePair]) -> Floats:
    parts: list[Floats] = []
    for pair in pairs:
        for answer in (pair.chosen, pair.rejected):
            if answer.ref_logprobs is None or len(answer.ref_logprobs) != len(answer.token_ids):
                raise InvalidSampleError(
                    f"{pair.id}: DPO needs the reference's log-probabilities: fill Answer.ref_logprobs with "
                    "PreferenceTrainer.logprobs before the first update, or from a ScoreModel"
                )
            parts.append(answer.ref_logprobs[answer_sequence(answer).wanted])
    return np.concatenate(parts).astype(np.float32)
