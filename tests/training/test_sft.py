"""Supervised training: the gradient, learning, held-out loss, and sharing an engine with RL."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rill.errors import InvalidSampleError, ModelError
from rill.models.loading import ModelConfig, load_model
from rill.training.exchange import deal_out
from rill.training.packing import PackSequence
from rill.training.parallel import Rendezvous
from rill.training.sft import SFTTrainer
from rill.types import Picture
from tests.training.tiny import MODEL, SHAPE, VOCAB, make_samples, run_ranks, trainer


@dataclass(frozen=True)
class Row:
    id: str
    token_ids: np.ndarray
    loss_mask: np.ndarray
    pictures: tuple[Picture, ...] = ()


def rows(count: int = 6) -> list[Row]:
    return [Row(s.id, s.trajectory.token_ids, s.trajectory.loss_mask) for s in make_samples(count)]


def sft(rendezvous: Rendezvous | None = None, **values: Any) -> SFTTrainer:
    values.setdefault("optimizer", {"learning_rate": 5e-3})
    return SFTTrainer(
        SFTTrainer.Config(**{"model": MODEL, "micro_batch_tokens": 48, **values}), rendezvous=rendezvous
    )


def update_on_a_rank(rendezvous: Rendezvous, steps: int) -> dict[str, Any]:
    t = sft(rendezvous)
    share = rows()[:5] if t.world.data_rank == 0 else rows()[5:]
    metrics = [t.update(share) for _ in range(steps)]
    sequences = [PackSequence(token_ids=row.token_ids, wanted=row.loss_mask) for row in share]
    dealt, imbalance = deal_out(sequences, [s.num_tokens for s in sequences], t.world)
    result = {
        "metrics": metrics,
        "eval": t.evaluate(share),
        "dealt": [s.token_ids.tolist() for s in dealt],
        "imbalance": imbalance,
    }
    t.close()
    return result


def test_the_loss_is_the_cross_entropy_of_masked_tokens() -> None:
    model = load_model(MODEL, dtype=torch.float32)
    total, count = 0.0, 0
    for row in rows():
        ids = torch.tensor(row.token_ids).long()
        labels = torch.where(torch.tensor(row.loss_mask), ids, torch.tensor(-100))
        logits = model(ids[None]).logits[0, :-1].detach()
        total += float(torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum"))
        count += int(row.loss_mask[1:].sum())
    metrics = sft().update(rows())
    assert metrics["loss"] == pytest.approx(total / count, rel=1e-5)
    assert metrics["trained_tokens"] == count
    assert metrics["sft/perplexity"] == pytest.approx(np.exp(total / count), rel=1e-4)


def test_training_lowers_the_loss_and_evaluate_trains_nothing() -> None:
    t = sft()
    before = t.evaluate(rows())
    assert t.evaluate(rows()) == before
    for _ in range(10):
        t.update(rows())
    assert t.evaluate(rows())["eval/loss"] < 0.7 * before["eval/loss"]


@pytest.mark.timeout(120)
def test_two_ranks_train_like_one(tmp_path: Path) -> None:
    alone = sft()
    wanted = [alone.update(rows()) for _ in range(3)]
    held_out = alone.evaluate(rows())
    results = run_ranks(tmp_path, 2, "tests.training.test_sft:update_on_a_rank", 3)
    dealt = [tokens for result in results for tokens in result["dealt"]]
    assert sorted(dealt) == sorted(row.token_ids.tolist() for row in rows())
    costs = [sum(map(len, result["dealt"])) for result in results]
    assert results[0]["imbalance"] == pytest.approx(max(costs) / np.mean(costs) - 1) and max(
        costs
    ) < 1.2 * min(costs)
    for result in results:
        for found, expected in zip(result["metrics"], wanted, strict=True):
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        assert result["eval"]["eval/loss"] == pytest.approx(held_out["eval/loss"], rel=1e-3)


def test_a_warm_up_on_the_policys_engine_leaves_it_a_fresh_optimizer() -> None:
    policy = trainer()
    before = policy.logprobs(make_samples())
    warm = SFTTrainer.sharing(policy, learning_rate=5e-3)
    metrics = [warm.update(rows(8)) for _ in range(3)]
    warm.finish()
    assert metrics[-1]["loss"] < metrics[0]["loss"] and metrics[0]["learning_rate"] == 5e-3
    assert policy.version == 0 and policy.learning_rate == 1e-3
    assert not np.allclose(before[0], policy.logprobs(make_samples())[0])
    assert policy.update(make_samples())["version"] == 1


def test_rows_that_cannot_be_right_are_refused() -> None:
    t = sft()
    with pytest.raises(InvalidSampleError, match="one bool for each token"):
        t.update([Row("a", np.arange(4, dtype=np.int32), np.ones(3, dtype=np.bool_))])
    with pytest.raises(InvalidSampleError, match="another tokenizer"):
        t.update([Row("a", np.array([0, VOCAB], dtype=np.int32), np.ones(2, dtype=np.bool_))])


def test_rows_that_are_too_long_are_an_error_or_left_out_and_counted() -> None:
    long = Row("long", np.zeros(60, dtype=np.int32), np.ones(60, dtype=np.bool_))
    with pytest.raises(InvalidSampleError, match="60 tokens"):
        sft().update([*rows(), long])
    skipping = sft(on_too_long="skip")
    metrics = skipping.update([*rows(), long])
    assert metrics["skipped_samples"] == 1 and metrics["loss"] == sft().update(rows())["loss"]
    assert skipping.evaluate([*rows(), long]) == skipping.evaluate(rows())


def test_a_tokenizer_larger_than_the_model_is_refused_at_construction() -> None:
    small = ModelConfig(shape={**SHAPE, "vocab_size": 16}, tokenizer="chars")
    with pytest.raises(ModelError, match="do not belong together"):
        sft(model=small)
