"""Whether an algorithm can run in a workflow, said at configuration time and in one line.

Callers: a workflow's config. The workflow says what it can launch; the trainer itself provides the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rill.algorithms.base import Need
from rill.errors import ConfigError
from rill.types import SamplingParams

if TYPE_CHECKING:
    from rill.algorithms.algorithm import Algorithm

_BY_TRAINER = frozenset({Need.OLD_LOGPROBS, Need.ENTROPY, Need.LAG, Need.STATISTICS})

_REMEDIES = {
    Need.VALUES: "a critic's values: use workflow = 'ppo'",
    Need.REF_LOGPROBS: "a reference model: use a workflow with one, or set algorithm.kl.coefficient = 0",
    Need.REWARD_LOGPROBS: "the policy's log-probabilities before the loss: use a workflow that scores samples, or set "
    "algorithm.kl.place = 'loss'",
    Need.ENERGIES: "the policy's own scores before the loss: use a workflow that scores samples",
    Need.TEACHER_LOGPROBS: "a teacher's log-probabilities: name one in [[teachers]]",
    Need.FULL_VOCABULARY_TEACHER: "teachers beside the trainer: name them in [[teachers]]",
    Need.GREEDY_BASELINE: "a greedy answer to each prompt: use a workflow that samples one",
}


def check_run(
    algorithm: Algorithm,
    *,
    workflow: str,
    provides: frozenset[Need],
    group_size: int,
    num_steps: int = 1,
    sampling: SamplingParams | None = None,
) -> None:
    """Raise ConfigError where the algorithm lacks something, or where something would be launched for nothing."""
    name, advantage = algorithm.config.type, algorithm.config.advantage.type
    given = provides | _BY_TRAINER
    if Need.REWARD_LOGPROBS in provides:
        given |= {Need.ENERGIES}
    for need in sorted(algorithm.needs - given):
        raise ConfigError(f"algorithm {name!r} in workflow {workflow!r} needs {_REMEDIES[need]}")
    if Need.VALUES in provides and Need.VALUES not in algorithm.needs:
        raise ConfigError(
            f"workflow {workflow!r} trains a critic, and advantage {advantage!r} of algorithm {name!r} never asks it: "
            "use a workflow without a critic, or algorithm = 'ppo'"
        )
    if group_size < algorithm.advantage.min_samples:
        raise ConfigError(
            f"advantage {advantage!r} compares at least {algorithm.advantage.min_samples} answers to a prompt, "
            f"group_size is {group_size}: raise it, or use an advantage that compares none (reinforce_pp, gae)"
        )
    if num_steps > 1 and not algorithm.advantage.allows_steps:
        raise ConfigError(
            f"advantage {advantage!r} is right for one optimizer step per batch, got {num_steps}: set "
            "trainer.num_epochs and trainer.num_mini_batches to 1"
        )
    _check_sampling(sampling or SamplingParams())


def _check_sampling(sampling: SamplingParams) -> None:
    """Log-probabilities are of the whole distribution: what cuts it would train another policy than it samples."""
    for key, value, off in (
        ("top_p", sampling.top_p, 1.0),
        ("top_k", sampling.top_k, 0),
        ("min_p", sampling.min_p, 0.0),
    ):
        if value != off:
            raise ConfigError(
                f"sampling.{key} = {value} cuts the distribution that training samples from, and log-probabilities are "
                f"of the whole one: set it to {off} (evaluations may cut)"
            )
