"""Guards of an embodied run (rill.workflows.robot_config), beside those that it has in common with every run."""

from __future__ import annotations

from rill.telemetry.guards import Guard

SHARED = ("lag", "mismatch", "disk", "memory", "no update", "gradient", "no finite gradient")
"""Guards of every run that say something of robots too."""
WATCHED = (
    Guard(
        name="failing simulators",
        metric="rollout/errors",
        is_off=lambda value: value > 0.1,
        expected="at most 10 %",
        meaning="Simulators crash, hang or give states that are not finite: `error` in the rollouts says how.",
        patience=2,
    ),
    Guard(
        name="success flat",
        metric="success/gain",
        is_off=lambda value: value < 0.01,
        expected="above 0.01 over the last 30 steps while it is below 90 %",
        meaning="The policy does not get better: raise the learning rate or the batch, add demonstrations "
        "(imitation.demos), or look at the films for what it does instead.",
        patience=10,
    ),
    Guard(
        name="no success",
        metric="success/mean",
        is_off=lambda value: value == 0.0,
        expected="above 0",
        meaning="With a sparse reward nothing can be learned from failures alone: begin with [imitation], easier "
        "states, or a longer max_steps.",
        patience=10,
    ),
    Guard(
        name="groups without signal",
        metric="groups/without_signal",
        is_off=lambda value: value > 0.8,
        expected="at most 80 %",
        meaning="In most groups all episodes end alike, so no advantage is left: states are too easy or too hard. Set "
        "algorithm.min_success and max_success, or a larger group_size.",
        patience=3,
    ),
    Guard(
        name="blind critic",
        metric="value/explained_variance",
        is_off=lambda value: value < -0.5,
        expected="above −0.5",
        meaning="The value head is worse than the mean return: lower the learning rate, raise value_coefficient, or "
        "use estimator = 'group', which needs none.",
        patience=10,
    ),
    Guard(
        name="clipped actions",
        metric="actions/clipped",
        is_off=lambda value: value > 0.3,
        expected="at most 30 %",
        meaning="The policy wants actions outside −1 … 1, which are cut: lower its spread or the learning rate.",
        patience=3,
    ),
    Guard(
        name="simulator-bound",
        metric="rollout/simulating",
        is_off=lambda value: value > 0.9,
        expected="at most 90 % of a stage's time in the simulator",
        meaning="The policy waits for simulators: more processes (rollout.stages), more env workers (placement.env) "
        "or smaller images would help; a faster policy would not.",
        patience=5,
    ),
    Guard(
        name="policy-bound",
        metric="rollout/simulating",
        is_off=lambda value: value < 0.1,
        expected="at least 10 % of a stage's time in the simulator",
        meaning="Simulators wait for the policy: longer chunks (policy.chunk), more devices for placement.rollout or "
        "more simulators per question (rollout.num_envs) would help.",
        patience=5,
    ),
    Guard(
        name="clipped updates",
        metric="policy/clipped",
        is_off=lambda value: value > 0.8,
        expected="at most 80 % of the ratios",
        meaning="Most ratios have left the trust region within one batch: lower the learning rate or num_epochs.",
        patience=5,
    ),
)
"""Guards of robots whose bounds hold for every run."""
