from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
from typing import Any

import numpy as np
import pytest

from rill.envs.child import Child, ChildDiedError
from rill.envs.robots.bank import Begin, Played
from rill.envs.robots.process import PackedPlays, SimulatorLostError, SimulatorProcess
from rill.errors import ConfigError
from rill.types import InitialState, Observation
from tests.envs.robots.fakes import CRASH, HANG, PointSimulator

CHUNK = np.ones((2, 1), np.float32)


@pytest.mark.parametrize(("state_id", "how"), [(CRASH, "died"), (HANG, "did not answer")])
def test_a_process_that_dies_or_hangs_is_killed_named_and_started_again(state_id: int, how: str) -> None:
    simulators = SimulatorProcess(PointSimulator.Config(), 2, timeout_s=2.0)
    try:
        assert simulators.spec().state_size == 2
        first_pid = simulators.pid
        simulators.reset({0: Begin(InitialState("point", "left", state_id))})
        with pytest.raises(SimulatorLostError, match=how):
            simulators.play({0: CHUNK})
        with pytest.raises(ProcessLookupError):
            os.kill(first_pid, 0)
        simulators.restart()
        assert not simulators.reset({0: Begin(InitialState("point", "left", 1))})[0].is_over
        assert simulators.play({0: CHUNK})[0].executed_J.all()
        assert simulators.num_restarts == 1
    finally:
        simulators.close()


def test_a_killed_process_is_noticed_and_a_wrong_task_is_a_users_mistake() -> None:
    from rill.envs.robots.arm import ArmSimulator

    pytest.importorskip("mujoco")
    simulators = SimulatorProcess(ArmSimulator.Config(), 1, timeout_s=30.0)
    try:
        with pytest.raises(ConfigError, match="no task 'green'"):
            simulators.reset({0: Begin(InitialState("arm", "green", 0))})
        simulators.reset({0: Begin(InitialState("arm", "red", 0))})
        os.kill(simulators.pid, signal.SIGKILL)
        with pytest.raises(SimulatorLostError, match="exit code -9"):
            simulators.play({0: np.zeros((1, 3), np.float32)})
    finally:
        simulators.close()


def test_a_process_that_dies_in_the_middle_of_its_answer_is_noticed() -> None:
    child = Child(half_an_answer, None)
    with pytest.raises(ChildDiedError):
        child.first()


def half_an_answer(setup: None) -> Any:
    """In the child."""
    whole = pickle.dumps((np.zeros(100_000), None, False), pickle.HIGHEST_PROTOCOL)
    with socket.socket(fileno=int(sys.argv[1])) as end:
        end.sendall(whole[: len(whole) // 2])
    os._exit(1)


def test_a_simulator_that_cannot_be_opened_is_one_clear_error() -> None:
    simulators = SimulatorProcess(PointSimulator.Config(step_s=-1.0), 1, timeout_s=5.0)
    try:
        with pytest.raises(ConfigError, match="takes -1 s"):
            simulators.spec()
    finally:
        simulators.close()


def test_what_comes_of_chunks_is_the_same_packed_or_not() -> None:
    def played(seed: int, length: int = 3, **more: Any) -> Played:
        draw = np.random.default_rng(seed)
        seen = Observation(state=draw.random(4, np.float32), images={}, instruction=f"touch {seed}")
        return Played(seen, draw.random(length, np.float32), draw.random(length) < 0.5, **more)

    picture = np.zeros((2, 2, 3), np.uint8)
    plain = {2: played(2, terminated=True, success=True), 5: played(5), 0: played(0, truncated=True)}
    for all_ in (plain, {**plain, 1: played(1, pictures=(picture,)), 3: Played.failed("fell")}):
        packed = PackedPlays.pack(all_)
        assert isinstance(packed, PackedPlays)
        found = packed.unpack()
        assert found.keys() == all_.keys()
        assert all(pickle.dumps(found[slot]) == pickle.dumps(each) for slot, each in all_.items())
    uneven = {0: played(0), 1: played(1, length=2)}
    assert PackedPlays.pack(uneven) is uneven
