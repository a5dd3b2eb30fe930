from __future__ import annotations

import numpy as np
import pytest

from rill.envs.robots.bank import Bank, Begin
from rill.envs.robots.recording import Choice, Recording, demonstrate
from rill.types import Decision, InitialState, PolicyVersion
from tests.envs.robots.fakes import NO_REWARD, NOT_FINITE, RAISE, PointSimulator

RIGHT = np.ones((4, 1), np.float32)


def point(state_id: int, task: str = "right") -> Begin:
    return Begin(InitialState("point", task, state_id))


@pytest.fixture
def bank() -> Bank:
    return Bank(PointSimulator.Config(), 3)


def test_a_chunk_ends_with_its_episode_and_the_rest_is_not_executed(bank: Bank) -> None:
    bank.reset({0: point(0)})
    bank.play({0: RIGHT[:3]})
    played = bank.play({0: RIGHT})[0]
    assert played.terminated and played.success and not played.truncated
    assert played.executed_J.tolist()[0] and not played.executed_J.tolist()[3]
    assert played.rewards_J.sum() == 1.0 and played.rewards_J[~played.executed_J].sum() == 0.0


def test_a_finished_simulator_is_never_stepped(bank: Bank) -> None:
    bank.reset({0: point(0)})
    while not bank.play({0: RIGHT})[0].is_over:
        pass
    with pytest.raises(AssertionError, match="reset it first"):
        bank.play({0: RIGHT})


def test_the_time_limit_truncates_and_does_not_terminate(bank: Bank) -> None:
    bank.reset({0: point(0)})
    last = [bank.play({0: 0 * RIGHT})[0] for _ in range(3)][-1]
    assert last.truncated and not last.terminated


def test_the_same_name_is_the_same_scene(bank: Bank) -> None:
    seen = bank.reset({slot: point(7) for slot in range(3)})
    assert len({tuple(played.observation.state.tolist()) for played in seen.values()}) == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("state_id", "said"),
    [(RAISE, "a joint fell off"), (NOT_FINITE, "not finite"), (NO_REWARD, "reward is nan")],
)
def test_a_simulator_that_fails_ends_its_own_episode_and_the_others_go_on(
    bank: Bank, state_id: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: PointSimulator) -> None:
        raise RuntimeError("cannot be closed either")

    monkeypatch.setattr(PointSimulator, "close", fails)
    bank.reset({0: point(state_id), 1: point(1)})
    played = bank.play({0: RIGHT, 1: RIGHT})
    assert said in (played[0].error or "") and played[1].error is None
    assert bank.reset({0: point(2)})[0].error is None


def test_a_recording_keeps_what_was_executed_and_the_final_observation(bank: Bank) -> None:
    start = InitialState("point", "right", 0)
    recording = Recording("g/0", "g", start, bank.reset({0: Begin(start)})[0])
    while not recording.is_over:
        zeros = np.zeros((2, 3), np.float32)
        latents = {"tokens": np.zeros((2, 3, 1), np.int16)}
        decision = Decision(np.stack([-RIGHT[:3], RIGHT[:3]]), latents, zeros, zeros[:, 0], zeros[:, 0])
        recording.add(Choice(decision, 1, PolicyVersion(3)), bank.play({0: RIGHT[:3]})[0])
    episode = recording.trajectory()
    assert episode.num_chunks == len(episode.observations) == len(episode.versions_C)
    assert episode.num_actions == episode.executed_CJ.sum() < episode.executed_CJ.size
    assert np.array_equal(episode.actions_CJA[0], RIGHT[:3])
    assert abs(episode.final.state[0]) >= 0.4
    assert episode.reward == 1.0 and set(episode.versions_C.tolist()) == {3}


def test_an_expert_shows_its_next_chunk_at_every_moment(bank: Bank) -> None:
    starts = [InitialState("point", task, n) for n in range(2) for task in ("left", "right")]
    shown = demonstrate(bank, 3, starts, chunk=4)
    assert shown.num_episodes == 4
    assert len(shown.observations) == len(shown.actions_BJA) == len(shown.mask_BJ)
    for observation, actions, mask in zip(shown.observations, shown.actions_BJA, shown.mask_BJ, strict=True):
        wanted = -1.0 if "left" in observation.instruction else 1.0
        assert mask[0] and (actions[mask] == wanted).all() and (actions[~mask] == 0).all()
