"""Reward models and policies learn which answer was preferred."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from rill.data.pairs import Answer, PreferencePair
from rill.errors import ConfigError, InvalidSampleError, TrainingError
from rill.models.loading import load_model
from rill.training.preference import PreferenceTrainer, RewardTrainer, open_loss
from rill.training.score import ScoreModel
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
    chosen = t.score([p.answers[0].token_ids for p in pairs()])
    rejected = t.score([p.answers[1].token_ids for p in pairs()])
    assert all(c > r for c, r in zip(chosen, rejected, strict=True))


def test_a_score_does_not_depend_on_the_other_sequences() -> None:
    t = RewardTrainer(RewardTrainer.Config(**settings()))
    t.update(pairs())
    sequences = [p.answers[0].token_ids for p in pairs()]
    together = t.score(sequences)
    assert together == pytest.approx([t.score([s])[0] for s in sequences], abs=1e-5)


def preferring(loss: str | dict[str, Any] = "dpo", **values: Any) -> PreferenceTrainer:
    config = PreferenceTrainer.Config(**settings(loss=loss, **values))
    reference = None
    if open_loss(config.loss).needs_reference:
        reference = ScoreModel(ScoreModel.Config(model=MODEL).following(config))
    return PreferenceTrainer(config, reference=reference)


def test_dpo_starts_at_log_two_and_widens_the_margin() -> None:
    t = preferring()
    first = t.update(pairs())
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-4)
    for _ in range(8):
        last = t.update(pairs())
    assert last["dpo/accuracy"] == 1.0 and last["dpo/margin"] > 0.5


@pytest.mark.parametrize("loss", ["dpo", "simpo", "orpo", "kto"])
def test_every_preference_loss_learns_which_answer_was_preferred(loss: str) -> None:
    t = preferring(loss)
    first = t.update(pairs())
    for _ in range(10):
        last = t.update(pairs())
    assert last["loss"] < first["loss"]
    assert last["dpo/reward_chosen"] - last["dpo/reward_rejected"] > (
        first["dpo/reward_chosen"] - first["dpo/reward_rejected"]
    )
    held_out = t.evaluate(pairs())
    assert held_out["eval/pairs"] == 4 and "eval/loss" in held_out


def test_kto_takes_the_kl_from_answers_under_other_prompts() -> None:
    """One training step, then the definition by hand: prompt of pair i, chosen answer of pair i + 1."""
    t = preferring("kto")
    first = t.update(pairs())
    assert first["dpo/kl"] == 0.0 and first["loss"] == pytest.approx(0.5, abs=1e-6)
    model = load_model(MODEL, dtype=torch.float32)
    trained = load_model(MODEL, dtype=torch.float32)
    trained.load_state_dict(dict(t.named_weights()))
    ratios = []
    given = pairs()
    for i, pair in enumerate(given):
        assert pair.chosen is not None
        other = given[(i + 1) % len(given)].chosen
        assert other is not None
        prompt, answer = (
            pair.chosen.token_ids[: pair.chosen.prompt_length],
            other.token_ids[other.prompt_length :],
        )
        ids = torch.tensor(np.concatenate([prompt, answer])).long()
        mask = torch.tensor(other.loss_mask[other.prompt_length :])
        logps = [
            m(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0].detach()
            for m in (trained, model)
        ]
        ratios.append(float((logps[0] - logps[1])[len(prompt) - 1 :][mask].sum()))
    found = t.update(pairs())["dpo/kl"]
    assert found == pytest.approx(max(0.0, float(np.mean(ratios))), abs=1e-3)


def test_kto_learns_from_answers_without_a_counterpart_and_others_refuse_them() -> None:
    alone = [
        dataclasses.replace(p, **{"rejected": None} if i % 2 else {"chosen": None})
        for i, p in enumerate(pairs())
    ]
    t = preferring("kto")
    first = t.update(alone)
    for _ in range(8):
        last = t.update(alone)
    assert last["loss"] < first["loss"] and last["samples"] == 4
    with pytest.raises(InvalidSampleError, match="one is missing"):
        preferring("simpo").update(alone)
    with pytest.raises(InvalidSampleError, match="one is missing"):
        RewardTrainer(RewardTrainer.Config(**settings())).update(alone)
    with pytest.raises(ConfigError, match="kto scores answers under other prompts"):
        PreferenceTrainer(PreferenceTrainer.Config(**settings(loss="kto")))


def test_a_reference_that_is_not_finite_changes_nothing_and_is_an_error_or_a_counted_skip() -> None:
    (pair,) = pairs(1)
    assert pair.chosen is not None and pair.rejected is not None
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
    with pytest.raises(InvalidSampleError, match="give PreferenceTrainer a reference"):
        t.update(pairs())


def test_an_answer_without_trained_tokens_is_refused() -> None:
    pair = pairs(1)[0]
    assert pair.chosen is not None
    empty = dataclasses.replace(pair.chosen, loss_mask=np.zeros_like(pair.chosen.loss_mask))
    with pytest.raises(InvalidSampleError, match="p0"):
        RewardTrainer(RewardTrainer.Config(**settings())).update([dataclasses.replace(pair, chosen=empty)])
