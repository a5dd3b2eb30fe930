"""The same numbers on a GPU as on the CPU."""

import pytest
import torch

from rill.algorithms import ADVANTAGES, LOSSES, Algorithm, AlgorithmConfig, TokenBatch
from tests.algorithms.batches import flat, random_sequences
from tests.algorithms.test_advantages import batch_of, random_rollouts

pytestmark = pytest.mark.gpu


def to_gpu(batch):
    moved = {}
    for name in batch.__dataclass_fields__:
        value = getattr(batch, name)
        moved[name] = value.detach().cuda() if isinstance(value, torch.Tensor) else value
    return type(batch)(**moved)


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("correction", ["none", "tis", "mis", "sequence_mask"])
def test_a_loss_on_the_gpu_equals_the_one_on_the_cpu(loss, correction):
    if loss in ("aipo", "decoupled", "dro"):  # they hold the ratio to the sampling policy themselves
        correction = "none"
    config = AlgorithmConfig(
        loss=loss,
        correction=correction,
        kl={"coefficient": 0.1},
        entropy_coefficient=0.1,
        distillation={"coefficient": 0.1},
    )
    algo = Algorithm(config)
    batch = flat(random_sequences(3, num_seqs=5))
    there: TokenBatch = to_gpu(batch)
    there.logprobs_N.requires_grad_()
    mine, theirs = algo.policy_loss(batch), algo.policy_loss(there)
    mine.numerator.backward()
    theirs.numerator.backward()
    assert theirs.numerator.is_cuda and all(m.total.is_cuda for m in theirs.metrics.values())
    assert torch.allclose(theirs.numerator.cpu(), mine.numerator)
    assert torch.allclose(there.logprobs_N.grad.cpu(), batch.logprobs_N.grad)


@pytest.mark.parametrize("advantage", sorted(ADVANTAGES))
def test_an_advantage_on_the_gpu_equals_the_one_on_the_cpu(advantage):
    kl = (
        {} if advantage == "gdpo" else {"kl": {"coefficient": 0.1, "place": "reward"}}
    )  # it does not read the reward
    algo = Algorithm(AlgorithmConfig(advantage=advantage, **kl))
    batch = batch_of(random_rollouts(5, group_size=4))
    found = algo.batch_advantages(to_gpu(batch)).advantages_N
    assert found.is_cuda
    assert torch.allclose(found.cpu(), algo.batch_advantages(batch).advantages_N)
