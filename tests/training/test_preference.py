"""Reward models and DPO learn which answer was preferred."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from rill.errors import InvalidSampleError, TrainingError
from rill.training.preference import Answer, PreferencePair, PreferenceTrainer, RewardTrainer
from tests.training.tiny import MODEL, make_samples


def pairs(count: int = 4) -> list[PreferencePair]:
    answers = [
        Answer(token_ids=s.trajectory.token_ids, loss_mask=s.trajectory.loss_mask)
        for s in make_samples(2 * count, group=2)
    ]
    return [
        PreferencePair(id=f"p{i}", chosen=answers[2 * i], rejected=answers[2 * i + 1]) for i in range(count)
    ]


def settings(**values: Any) -> dict[str, Any]:
    return {"model": MODEL, "micro_batch_tokens": 80, "optimizer": {"learning_rate": 5e-3}, **values}


def test_a_fresh_reward_model_prefers_nothing_and_learns_to_prefer() -> None:
    t = RewardTrainer(RewardTrainer.Config(**settings()))
    first = t.update(pairs())
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    for _ in range(15):
        last = t.update(pairs())
    assert last["loss"] < 0.3 * first["loss"] and last["reward_model/accuracy"] == 1.0
    chosen = t.score([p.chosen.token_ids for p in pairs()])
    rejected = t.score([p.rejected.token_ids for p in pairs()])
    assert all(c > r for c, r in zip(chosen, rejected, strict=True))


def test_a_score_does_not_depend_on_the_other_sequences() -> None:
    t = RewardTrainer(RewardTrainer.Config(**settings()))
    t.update(pairs())
    sequences = [p.chosen.token_ids for p in pairs()]
    together = t.score(sequences)
    assert together == pytest.approx([t.score([s])[0] for s in sequences], abs=1e-5)


def test_dpo_starts_at_log_two_and_widens_the_margin() -> None:
    t = PreferenceTrainer(PreferenceTrainer.Config(**settings()))
    filled = [
        dataclasses.replace(
            p,
            chosen=dataclasses.replace(p.chosen, ref_logprobs=c),
            rejected=dataclasses.replace(p.rejected, ref_logprobs=r),
        )
        for p, c, r in zip(
            pairs(),
            t.logprobs([p.chosen for p in pairs()]),
            t.logprobs([p.rejected for p in pairs()]),
            strict=True,
        )
    ]
    first = t.update(filled)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-4)
    for _ in range(8):
        last = t.update(filled)
    assert last["dpo/accuracy"] == 1.0 and last["dpo/margin"] > 0.5


def test_a_reference_that_is_not_finite_changes_nothing_and_is_an_error_or_a_counted_skip() -> None:
    (pair,) = pairs(1)
    nan = np.full(len(pair.chosen.token_ids), np.nan, np.float32)
    zero = np.zeros(len(pair.rejected.token_ids), np.float32)
    bad = dataclasses.replace(
        pair,
        chosen=dataclasses.replace(pair.chosen, ref_logprobs=nan),
        rejected=dataclasses.replace(pair.rejected, ref_logprobs=zero),
    )
    with pytest.raises(TrainingError, match="not finite .*margins"):
        PreferenceTrainer(PreferenceTrainer.Config(**settings())).update([bad])
    skipping = PreferenceTrainer(PreferenceTrainer.Config(**settings(on_nonfinite="skip")))
    assert skipping.update([bad])["skipped_steps"] == 1 and skipping.version == 0


def test_dpo_without_reference_logprobs_says_how_to_get_them() -> None:
    t = PreferenceTrainer(PreferenceTrainer.Config(**settings()))
    with pytest.raises(InvalidSampleError, match=r"PreferenceTrainer\.logprobs"):
        t.update(pairs())


def test_an_answer_without_trained_tokens_is_refused() -> None:
    pair = pairs(1)[0]
    empty = dataclasses.replace(pair.chosen, loss_mask=np.zeros_like(pair.chosen.loss_mask))
    with pytest.raises(InvalidSampleError, match="p0"):
        RewardTrainer(RewardTrainer.Config(**settings())).update([dataclasses.replace(pair, chosen=empty)])
