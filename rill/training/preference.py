"""Learning from pairs: RewardTrainer (Bradley–Terry) and PreferenceTrainer (DPO, SimPO, ORPO, KTO), on the same engine.

A pair is two answers to one prompt, one preferred; for KTO one of them may be missing. Both stay in one micro-batch.
RewardTrainer reads one score at each sequence's last token; the model it exports scores answers in an RLHF run.
PreferenceTrainer trains a policy directly; where the loss compares with a reference, it asks the frozen one it has.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from rill.algorithms.base import LossSum
from rill.algorithms.preferences import PREFERENCES
from rill.algorithms.preferences.base import PreferenceBatch, PreferenceLoss
from rill.algorithms.preferences.bradley_terry import BradleyTerryConfig, bradley_terry_loss
from rill.algorithms.preferences.dpo import DPO
from rill.config import OneOf, PartConfig
from rill.data.pairs import Answer, PreferencePair
from rill.errors import ConfigError, InvalidSampleError
from rill.training.batching import MicroBatch, Tally
from rill.training.engine_config import EngineConfig
from rill.training.module import PackedModule, load_value_module
from rill.training.packing import PackSequence, predicted
from rill.training.parallel import Rendezvous
from rill.training.score import ScoreModel, sequence_scores
from rill.training.trainer import Trainer
from rill.types import Floats, TokenIds


class PairTrainer(Trainer):
    """What both have in common: pairs to packs."""

    needs_pairs = True

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
        kept = self._prepared(self._dealt_out(own, lambda p: [len(a.token_ids) for a in p.answers]))
        for batch, inside in self._passes(kept):
            outputs = self._outputs(batch)
            loss = self._guarded(functools.partial(self._loss, batch, inside, outputs), outputs)
            self._learn(batch, loss, outputs)
        self._count(samples=len(kept))

    def evaluate(self, pairs: Sequence[PreferencePair]) -> dict[str, float]:
        """The loss's metrics on held-out pairs over all ranks; nothing is trained."""
        tally = Tally()
        kept = self._prepared([pair for pair in self._checked(pairs) if self.keeps(pair.num_tokens)])
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
        sequences = [PackSequence.of(a, p.id) for p in pairs for a in p.answers]
        owner = [number for number, p in enumerate(pairs) for _ in p.answers]
        units: list[list[int]] = [[] for _ in pairs]
        for index, number in enumerate(owner):
            units[number].append(index)
        for batch in self.batcher.micro_batches(sequences, units):
            yield batch, [pairs[number] for number in dict.fromkeys(owner[i] for i in batch.indices)]

    def _prepared(self, pairs: list[PreferencePair]) -> list[PreferencePair]:
        """This rank's share of a whole batch, before its first pass; by default as it is."""
        return pairs

    def _outputs(self, batch: MicroBatch) -> torch.Tensor:
        """What the loss of one pass is made from; every parameter is reached through it."""
        raise AssertionError("a subclass has the model's outputs")

    def _loss(self, batch: MicroBatch, pairs: Sequence[PreferencePair], outputs: torch.Tensor) -> LossSum:
        raise AssertionError("a subclass has the loss")

    def _checked(self, pairs: Sequence[PreferencePair]) -> Sequence[PreferencePair]:
        for pair in pairs:
            if not pair.answers or (self.needs_pairs and len(pair.answers) < 2):
                raise InvalidSampleError(
                    f"{pair.id}: this loss compares a chosen with a rejected answer, and one is missing: only kto "
                    "learns from single answers"
                )
            for answer in pair.answers:
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

    config: Config

    def score(self, sequences: Sequence[TokenIds]) -> list[float]:
        """The model's reward of each whole sequence."""
        return sequence_scores(self.engine.module, self.batcher, sequences)

    def _make_module(self, config: EngineConfig, device: torch.device) -> PackedModule:
        return load_value_module(config.model, device)

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
    """Optimises a policy on preferences directly."""

    class Config(EngineConfig):
        loss: Annotated[PartConfig, OneOf(PREFERENCES)] = Field(default_factory=lambda: DPO.Config())
        """dpo (sigmoid, hinge, ipo), simpo, orpo or kto."""

    def __init__(
        self,
        config: Config,
        *,
        reference: ScoreModel | None = None,
        rendezvous: Rendezvous | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        """`reference`: the policy as it was before the first step, where the loss needs one (`needs_reference`)."""
        super().__init__(config, rendezvous=rendezvous, device=device)
        self.config: PreferenceTrainer.Config = config
        self.loss = open_loss(config.loss)
        self.needs_pairs = self.loss.needs_pairs
        self.reference = reference
        self._kl = 0.0
        if self.loss.needs_kl and reference is None:
            raise ConfigError(
                f"{config.loss.type} scores answers under other prompts by its reference: give one"
            )

    def logprobs(self, answers: Sequence[Answer]) -> list[Floats]:
        """log π of the answers' trained tokens, aligned with token_ids."""
        sequences = [PackSequence.of(a) for a in answers]
        return self.batcher.per_token(sequences, lambda pack: self.engine.module(pack).logprobs_K)

    def _prepared(self, pairs: list[PreferencePair]) -> list[PreferencePair]:
        if self.loss.needs_reference and self.reference is not None:
            missing = [a for p in pairs for a in p.answers if a.ref_logprobs is None]
            scored = self.reference.logprobs_of([PackSequence.of(a) for a in missing])
            filled = {id(a): replace(a, ref_logprobs=x) for a, x in zip(missing, scored, strict=True)}
            pairs = [
                replace(
                    p,
                    chosen=filled.get(id(p.chosen), p.chosen),
                    rejected=filled.get(id(p.rejected), p.rejected),
                )
                for p in pairs
            ]
        if self.loss.needs_kl:
            self._kl = self._mismatched_kl(pairs)
        return pairs

    def _mismatched_kl(self, pairs: Sequence[PreferencePair]) -> float:
        """max(0, mean log π/π_ref) of answers under the next pair's prompt, over all ranks."""
        assert self.reference is not None
        firsts = [pair.answers[0] for pair in pairs]
        shifted = [mismatched(a, b) for a, b in zip(firsts[1:] + firsts[:1], firsts, strict=True)]
        limit = self.config.micro_batch_tokens if len(pairs) > 1 else 0  # one pair has no other prompt
        answers = [a for a in shifted if len(a.token_ids) <= limit]
        own = self.logprobs(answers)
        theirs = self.reference.logprobs_of([PackSequence.of(a) for a in answers])
        total = sum(float((x - y).sum()) for x, y in zip(own, theirs, strict=True))
        sums = self.world.sum_over_data(torch.tensor([total, float(len(answers))], dtype=torch.float64))
        return max(0.0, float(sums[0]) / max(1.0, float(sums[1])))

    def _outputs(self, batch: MicroBatch) -> torch.Tensor:
        logprobs_K: torch.Tensor = self.engine.module(batch.pack).logprobs_K
        return logprobs_K

    def _loss(self, batch: MicroBatch, pairs: Sequence[PreferencePair], outputs: torch.Tensor) -> LossSum:
        good = [answer is pair.chosen for pair in pairs for answer in pair.answers] or [True]
        starts = np.cumsum([0, *(len(pair.answers) for pair in pairs)])[:-1]
        whole = [int(start) for start, pair in zip(starts, pairs, strict=True) if len(pair.answers) == 2]
        chosen_P = torch.tensor(whole, dtype=torch.int64, device=outputs.device)
        rejected_P = chosen_P + 1
        reference_K: torch.Tensor | None = outputs.detach()
        if batch.is_idle:  # one sequence, compared with itself
            chosen_P = rejected_P = torch.zeros(1, dtype=torch.int64, device=outputs.device)
        elif self.loss.needs_reference:
            reference_K = torch.from_numpy(_reference(pairs)).to(outputs.device)
        return self.loss(
            PreferenceBatch(
                logprobs_N=outputs,
                ref_logprobs_N=reference_K,
                mask_N=torch.ones_like(outputs),
                seq_N=batch.pack.seq_K,
                num_seqs=batch.pack.num_seqs,
                is_good_S=torch.tensor(good, device=outputs.device),
                chosen_P=chosen_P,
                rejected_P=rejected_P,
                kl=self._kl,
            )
        )


def open_loss(config: PartConfig) -> PreferenceLoss:
    """The loss of a config; says whether a reference is needed before a trainer is made."""
    loss: PreferenceLoss = PREFERENCES.load(config.type)(config)
    return loss


def mismatched(answer: Answer, other: Answer) -> Answer:
    """`answer` under the prompt of `other`."""
    prompt, own = other.prompt_length, answer.prompt_length
    return Answer(
        token_ids=np.concatenate([other.token_ids[:prompt], answer.token_ids[own:]]),
        loss_mask=np.concatenate([np.zeros(prompt, dtype=np.bool_), answer.loss_mask[own:]]),
        pictures=other.pictures,
    )


def _reference(pairs: Sequence[PreferencePair]) -> Floats:
    parts: list[Floats] = []
    for pair in pairs:
        for answer in pair.answers:
            if answer.ref_logprobs is None or len(answer.ref_logprobs) != len(answer.token_ids):
                raise InvalidSampleError(
                    f"{pair.id}: the loss needs the reference's log-probabilities: give PreferenceTrainer a reference"
                )
            parts.append(answer.ref_logprobs[predicted(answer.loss_mask)])
    return np.concatenate(parts).astype(np.float32)
