from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rill.algorithms import Algorithm, AlgorithmConfig, TokenBatch
from rill.algorithms.distill import Teacher, full_vocabulary_kl
from rill.errors import ModelError, TrainingError

N, V, D, E = 11, 17, 5, 4


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return (
        make(N, D).requires_grad_(),
        make(V, D).requires_grad_(),
        make(N, E),
        make(V, E),
        make(N, E),
        make(V, E),
    )


def dense(hidden, head, teacher_hidden, teacher_head, direction="reverse", temperature=1.0):
    """All logits at once."""
    student = torch.log_softmax(hidden @ head.T / temperature, -1)
    teacher = torch.log_softmax(teacher_hidden @ teacher_head.T / temperature, -1)
    p, q = (student, teacher) if direction == "reverse" else (teacher, student)
    return torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)


@settings(max_examples=20, deadline=None)
@given(
    chunk=st.integers(1, 13),
    direction=st.sampled_from(["reverse", "forward"]),
    temperature=st.sampled_from([1.0, 0.5]),
)
def test_the_chunked_divergence_and_its_gradients_equal_the_dense_ones(chunk, direction, temperature):
    hidden, head, teacher_hidden, teacher_head, _, _ = tensors()
    teacher = Teacher(hidden_ME=teacher_hidden, load_head=lambda: teacher_head)
    found = full_vocabulary_kl(
        hidden, head, [teacher], direction=direction, temperature=temperature, chunk_tokens=chunk
    )
    expected = dense(hidden, head, teacher_hidden, teacher_head, direction, temperature)
    assert torch.allclose(found, expected, atol=1e-12)
    weights = torch.arange(1.0, N + 1, dtype=torch.float64)
    mine = torch.autograd.grad((found * weights).sum(), (hidden, head))
    theirs = torch.autograd.grad((expected * weights).sum(), (hidden, head))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(mine, theirs))


def test_several_teachers_add_up_and_each_head_is_loaded_once():
    hidden, head, hidden_a, head_a, hidden_b, head_b = tensors(1)
    loads = []

    def loader(name, value):
        def load():
            loads.append(name)
            return value

        return load

    index = torch.tensor([0, 3, 4, 9])
    found = full_vocabulary_kl(
        hidden,
        head,
        [
            Teacher(hidden_ME=hidden_a, load_head=loader("a", head_a), weight=0.7),
            Teacher(hidden_ME=hidden_b[index], index_M=index, load_head=loader("b", head_b), weight=0.2),
        ],
        chunk_tokens=3,
    )
    expected = 0.7 * dense(hidden, head, hidden_a, head_a)
    expected = expected.index_add(0, index, 0.2 * dense(hidden, head, hidden_b, head_b)[index])
    assert torch.allclose(found, expected)
    found.sum().backward()
    assert loads == ["a", "b"]


def test_a_student_equal_to_its_teacher_has_nothing_to_learn():
    hidden, head, *_ = tensors()
    teacher = Teacher(hidden_ME=hidden.detach(), load_head=lambda: head)
    found = full_vocabulary_kl(hidden, head, [teacher])
    gradient, _ = torch.autograd.grad(found.sum(), (hidden, head))
    assert found.abs().max() < 1e-12 and gradient.abs().max() < 1e-12


def test_other_vocabularies_and_missing_states_are_refused():
    hidden, head, teacher_hidden, teacher_head, _, _ = tensors()
    with pytest.raises(ModelError, match="17 and 16"):
        full_vocabulary_kl(
            hidden, head, [Teacher(hidden_ME=teacher_hidden, load_head=lambda: teacher_head[:16])]
        )
    with pytest.raises(TrainingError, match="10 teacher states for 11 tokens"):
        full_vocabulary_kl(
            hidden, head, [Teacher(hidden_ME=teacher_hidden[:10], load_head=lambda: teacher_head)]
        )


def test_the_divergence_is_aggregated_like_any_loss():
    zeros = torch.zeros(4)
    batch = TokenBatch(
        logprobs_N=zeros, mask_N=torch.tensor([1.0, 0.0, 1.0, 1.0]), seq_N=torch.tensor([0, 0, 1, 1]), num_seqs=2,
        advantages_N=zeros, old_logprobs_N=zeros, rollout_logprobs_N=zeros,
    )  # fmt: skip
    config = {"coefficient": 2.0, "form": "full_vocabulary"}
    kl = torch.tensor([1.0, float("nan"), 2.0, 4.0])
    algo = Algorithm(AlgorithmConfig(type="distill", distillation=config, aggregation="seq-mean-token-mean"))
    result = algo.policy_loss(replace(batch, teacher_kl_N=kl))
    assert float(result.numerator / result.denominator) == 2.0 * (1.0 + 3.0) / 2
    with pytest.raises(TrainingError, match="teacher_kl_N: 3"):
        algo.policy_loss(replace(batch, teacher_kl_N=torch.full((4,), float("nan"))))
    with pytest.raises(TrainingError, match="needs teacher_kl_N"):
        algo.policy_loss(batch)


def test_a_token_that_a_correction_takes_out_is_out_of_the_divergence_too():
    """Both terms are divided by one denominator, so they must be sums over the same tokens."""
    zeros = torch.zeros(4)
    batch = TokenBatch(
        logprobs_N=zeros, mask_N=torch.ones(4), seq_N=torch.zeros(4, dtype=torch.int64), num_seqs=1,
        advantages_N=zeros, old_logprobs_N=zeros, rollout_logprobs_N=zeros,
        lag_N=torch.tensor([0.0, 0.0, 9.0, 9.0]), teacher_kl_N=torch.tensor([1.0, 3.0, 50.0, 50.0]),
    )  # fmt: skip
    config = {"coefficient": 2.0, "form": "full_vocabulary"}
    young = Algorithm(
        AlgorithmConfig(type="distill", distillation=config, correction={"type": "lag_limit", "max_lag": 1})
    )
    result = young.policy_loss(batch)
    assert float(result.numerator / result.denominator) == 2.0 * (1.0 + 3.0) / 2
