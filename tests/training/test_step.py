"""A step whose batch comes in chunks: the same gradient as the whole batch at once, on one rank and on several."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rill.errors import TrainingError
from rill.training.parallel import Rendezvous, World
from rill.training.policy import PolicyTrainer
from rill.training.step import StepTrainer
from rill.training.value import ValueTrainer
from rill.types import Sample
from tests.training.tiny import MODEL, algorithm, config, make_samples, run_ranks, trainer


def with_columns(samples: list[Sample]) -> list[Sample]:
    """What KL and a critic ask for."""
    return [
        dataclasses.replace(
            s, ref_logprobs=0.9 * s.trajectory.logprobs, values=0.1 * s.advantages, returns=s.advantages
        )
        for s in samples
    ]


def policy(
    rendezvous: Rendezvous | None = None, *, algo: dict[str, Any] | None = None, **values: Any
) -> PolicyTrainer:
    return PolicyTrainer(config(**values), algorithm(**(algo or {})), rendezvous=rendezvous)


def critic(rendezvous: Rendezvous | None = None, **values: Any) -> ValueTrainer:
    settings = {"model": MODEL, "optimizer": {"learning_rate": 1e-3}, **values}
    return ValueTrainer(ValueTrainer.Config(**settings), algorithm(), rendezvous=rendezvous)


KL = {"kl": {"coefficient": 0.1}}
KINDS: dict[str, Callable[..., StepTrainer]] = {
    "plain": lambda r=None: policy(r),
    "packed": lambda r=None: policy(r, micro_batch_tokens=40, tree_packing=True),
    "kl": lambda r=None: policy(r, algo={**KL, "aggregation": "seq-mean-token-mean"}),
    "bfloat16": lambda r=None: policy(r, compute_dtype="bfloat16", micro_batch_tokens=40),
    "critic": lambda r=None: critic(r, micro_batch_tokens=48),
    "mini-batches": lambda r=None: policy(r, algo=KL, num_mini_batches=2, num_epochs=2),
    "statistics": lambda r=None: policy(r, algo={"correction": {"type": "tis", "normalise": True}}),
    "critic's mini-batches": lambda r=None: critic(r, num_mini_batches=2),
}
CHUNKS = [slice(0, 1), slice(1, 6), slice(6, 6), slice(6, 12)]


def train(
    t: StepTrainer, chunks: list[list[Sample]]
) -> tuple[dict[str, float], dict[str, np.ndarray[Any, Any]]]:
    begin: Any = t.begin  # type: ignore[attr-defined]
    begin()
    for chunk in chunks:
        t.accumulate(chunk)
    metrics = t.finish()
    return metrics, {name: w.float().numpy() for name, w in t.named_weights()}


def assert_alike(found: dict[str, float], wanted: dict[str, float], rel: float) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        if not name.endswith(("_s", "computed_tokens")):  # times; a chunk's shared prefixes are its own
            assert found[name] == pytest.approx(wanted[name], rel=rel, abs=rel), name


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_chunks_in_any_number_are_the_step_on_the_whole_batch(kind: str) -> None:
    samples = with_columns(make_samples(12))
    whole: Any = KINDS[kind]()
    pieces: Any = KINDS[kind]()
    for t, chunks in ((whole, [samples]), (pieces, [samples[c] for c in CHUNKS])):
        t.begin()
        for chunk in chunks:
            t.accumulate(chunk)
    assert bool(whole.waits_for) == (kind in ("mini-batches", "statistics", "critic's mini-batches"))
    tolerance = 2e-2 if kind == "bfloat16" else 1e-5
    if not whole.waits_for:
        found = pieces.engine.gradients()
        for name, gradient in whole.engine.gradients().items():
            assert (found[name] - gradient).norm() <= tolerance * gradient.norm(), name
    assert_alike(pieces.finish(), whole.finish(), rel=10 * tolerance)
    if whole.waits_for:  # the whole batch is trained at once, whatever it came in
        for (name, a), (_, b) in zip(whole.named_weights(), pieces.named_weights(), strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("kind", ["packed", "bfloat16", "critic"])
def test_the_same_chunks_in_the_same_order_give_the_same_bits(kind: str) -> None:
    samples = with_columns(make_samples(12))
    results = [train(KINDS[kind](), [samples[c] for c in CHUNKS]) for _ in range(2)]
    for name, w in results[0][1].items():
        np.testing.assert_array_equal(results[1][1][name], w, err_msg=name)
    whole = [train(KINDS[kind](), [samples]) for _ in range(2)]
    for name, w in whole[0][1].items():
        np.testing.assert_array_equal(whole[1][1][name], w, err_msg=name)


def chunks_on_a_rank(rendezvous: Rendezvous, kinds: list[str]) -> dict[str, Any]:
    """Each rank has its own part of each chunk, unequal and sometimes nothing."""
    results = {}
    for kind in kinds:
        t = KINDS[kind](rendezvous)
        samples = with_columns(make_samples(12))
        first = t.world.data_rank == 0
        parts = [(samples[c][:-1] if first else samples[c][-1:]) for c in CHUNKS]
        results[kind] = train(t, parts)
    return results


@pytest.mark.timeout(180)
def test_two_ranks_with_unequal_parts_of_each_chunk_take_the_step_of_one_process(tmp_path: Path) -> None:
    kinds = ["packed", "kl", "critic", "mini-batches", "statistics"]
    ranks = run_ranks(tmp_path, 2, "tests.training.test_step:chunks_on_a_rank", kinds)
    samples = with_columns(make_samples(12))
    for kind in kinds:
        for name, w in ranks[0][kind][1].items():
            np.testing.assert_array_equal(ranks[1][kind][1][name], w, err_msg=name)
        if kind == "mini-batches":
            continue  # each rank cuts its own samples: other mini-batches than one process has
        wanted, weights = train(KINDS[kind](), [samples])
        for rank in ranks:
            for name in ("loss", "grad_norm", "samples", "trained_tokens"):
                assert rank[kind][0][name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-5), (kind, name)
        for name, w in weights.items():
            np.testing.assert_allclose(ranks[0][kind][1][name], w, atol=2.1e-3, err_msg=name)


def test_a_step_that_fails_half_way_leaves_nothing_behind() -> None:
    samples = make_samples()
    t, clean = trainer(), trainer()
    t.begin()
    t.accumulate(samples[:3])
    with pytest.raises(TrainingError, match="not finite"):
        t.update([dataclasses.replace(samples[0], advantages=np.nan * samples[0].advantages)])
    assert t.update(samples)["samples"] == len(samples)
    clean.update(samples)
    for (name, a), (_, b) in zip(t.named_weights(), clean.named_weights(), strict=True):
        assert torch.equal(a, b), name


def test_chunks_without_a_beginning_are_refused() -> None:
    t = trainer()
    with pytest.raises(TrainingError, match="begin"):
        t.accumulate(make_samples(2))
    t.update(make_samples(2))
    with pytest.raises(TrainingError, match="begin"):
        t.finish()


def test_waiting_between_chunks_is_not_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("rill.training.trainer.time.perf_counter", lambda: clock[0])
    t = trainer()
    t.begin()
    t.accumulate(make_samples(2))
    clock[0] += 100.0
    t.accumulate(make_samples(2))
    assert t.finish()["train_s"] == 0.0


def test_the_policy_stays_as_it_is_while_its_critic_learns() -> None:
    samples = make_samples()
    t = trainer(critic_warmup=2, num_mini_batches=2)
    before = {n: w.clone() for n, w in t.named_weights()}
    for step in (1, 2):
        metrics = t.update(samples)
        assert metrics["samples"] == len(samples) and t.version == 2 * step
    assert all(torch.equal(w, before[n]) for n, w in t.named_weights())
    with pytest.raises(TrainingError, match="without begin"):
        trainer(critic_warmup=1).finish()
    assert t.update(samples)["grad_norm"] > 0 and t.version == 6
    assert any(not torch.equal(w, before[n]) for n, w in t.named_weights())


def test_several_steps_without_old_logprobs_report_the_mismatch_of_the_first_only() -> None:
    """A policy that has moved since the batch began is no mismatch between engine and trainer (aipo and its like)."""
    samples = make_samples()
    scored = trainer().logprobs(samples, trained_only=True)
    exact = [
        dataclasses.replace(s, trajectory=dataclasses.replace(s.trajectory, logprobs=x))
        for s, x in zip(samples, scored, strict=True)
    ]
    values: dict[str, Any] = {"num_mini_batches": 4, "optimizer": {"learning_rate": 0.05}}
    for loss in ("aipo", "clip", "reinforce"):
        metrics = PolicyTrainer(config(**values), algorithm(loss=loss)).update(exact)
        assert metrics["mismatch/abs_mean"] < 1e-4, loss


def test_a_host_tensor_is_summed_over_the_device_that_ranks_talk_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch advantages are host tensors; NCCL takes none (see also test_nccl.py)."""

    class Stop(Exception):
        pass

    class Mesh:
        def get_group(self, axis: str) -> str:
            return axis

    def all_reduce(values: torch.Tensor, **_: Any) -> None:
        assert values.device.type == "meta"
        raise Stop

    monkeypatch.setattr("rill.training.parallel.dist.all_reduce", all_reduce)
    world = World(Mesh(), torch.device("meta"))  # type: ignore[arg-type]
    with pytest.raises(Stop):
        world.sum_over_data(torch.ones(2))


def test_a_maximum_over_several_steps_is_the_largest_of_them() -> None:
    samples = make_samples(12)
    apart = [x.trajectory.logprobs.copy() for x in samples]
    apart[5][np.flatnonzero(samples[5].trajectory.loss_mask)[-1]] -= 9.0
    samples = [
        dataclasses.replace(x, trajectory=dataclasses.replace(x.trajectory, logprobs=y))
        for x, y in zip(samples, apart, strict=True)
    ]
    of_one, of_four = policy().update(samples), policy(num_mini_batches=4).update(samples)
    assert of_one["mismatch/abs_max"] > 5
    assert of_four["mismatch/abs_max"] == pytest.approx(of_one["mismatch/abs_max"], rel=1e-4)
    assert of_four["policy/ratio_max"] >= of_four["policy/ratio"]
