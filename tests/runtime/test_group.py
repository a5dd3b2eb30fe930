"""Groups, calls and handles, with real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rill.errors import (
    PeerDiedError,
    PlanError,
    RillError,
    RunError,
    StuckError,
    UnpicklableError,
    UserError,
    WorkerError,
)
from rill.runtime.cluster import Cluster
from rill.runtime.group import WorkerGroup
from rill.runtime.process import supervisor
from tests.runtime.leftovers import becomes_true, is_running
from tests.runtime.workers import Echo, OneWay, Slow, Thorny, Waiting

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(devices="cpu:4") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def echo(cluster: Cluster) -> WorkerGroup[Echo]:
    return Echo.launch(cluster, name="echo", placement="0-1", base=10, threads=1, env={"COLOUR": "green"})


@pytest.fixture(scope="module")
def thorny(cluster: Cluster) -> WorkerGroup[Thorny]:
    return Thorny.launch(cluster, name="thorny", placement="0-1", threads=1)


def test_a_call_runs_on_every_rank_and_gives_one_result_each(echo: WorkerGroup[Echo]) -> None:
    assert echo.plus(1).wait(10) == [11, 11]


def test_a_worker_knows_its_seat_before_init_runs(echo: WorkerGroup[Echo]) -> None:
    assert echo.seat().wait(10) == [(0, 2, "echo", "cpu"), (1, 2, "echo", "cpu")]
    assert echo.device_ids().wait(10) == [[0], [1]]


def test_the_environment_and_threads_are_set_per_process(echo: WorkerGroup[Echo]) -> None:
    names = ("COLOUR", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    expected = {"COLOUR": "green", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert echo.environment(*names).wait(10) == [expected, expected]


def test_workers_import_neither_torch_nor_numpy_unless_their_class_does(echo: WorkerGroup[Echo]) -> None:
    assert echo.modules("torch", "numpy", "ray").wait(10) == [[], []]


def test_a_selection_calls_only_its_ranks(echo: WorkerGroup[Echo]) -> None:
    assert echo.on(1).seat().wait(10) == [(1, 2, "echo", "cpu")]
    with pytest.raises(UserError, match="ranks 0, 1, asked"):
        echo.on(5)


def test_calls_run_in_the_order_they_were_made(echo: WorkerGroup[Echo]) -> None:
    for number in range(200):
        echo.on(0).note(number)
    assert echo.on(0).noted().wait(10) == [list(range(200))]


def test_a_concurrent_method_runs_while_another_call_does(echo: WorkerGroup[Echo]) -> None:
    waiting = echo.wait_for_release(10)
    assert not waiting.done()
    assert echo.release().wait(10) == ["release", "release"]
    assert waiting.wait(10) == [True, True]


def test_arrays_arrive_whole_and_writable(echo: WorkerGroup[Echo]) -> None:
    array = np.arange(300_000, dtype=np.float32).reshape(3, -1)
    for value in echo.echo({"a": [array, array[:, ::2]], "b": b"x" * 100_000}).wait(10):
        np.testing.assert_array_equal(value["a"][0], array)
        np.testing.assert_array_equal(value["a"][1], array[:, ::2])
        assert value["b"] == b"x" * 100_000


def test_a_coroutine_method_gives_its_result(echo: WorkerGroup[Echo]) -> None:
    assert echo.later(1).wait(10) == [2, 2]


def test_an_exception_comes_with_group_rank_and_traceback_and_the_worker_lives_on(
    echo: WorkerGroup[Echo],
) -> None:
    with pytest.raises(WorkerError) as caught:
        echo.on(1).fail("bad batch").wait(10)
    assert (caught.value.group, caught.value.rank) == ("echo", 1)
    assert "in fail" in caught.value.remote_traceback
    assert isinstance(caught.value.__cause__, ValueError)
    assert echo.plus(1).wait(10) == [11, 11]


@pytest.mark.parametrize("method", ["thorn", "thorn_beside"])
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("mute", "Mute: .its text cannot be had: AttributeError in __str__"),
        ("unpicklable", "ValueError: of the old school"),
        ("unknown there", "Stranger: of the old school"),
        ("no text", r"ValueError: a file called \?"),
    ],
)
def test_an_exception_that_cannot_travel_is_told_in_words(
    thorny: WorkerGroup[Thorny], kind: str, told: str, method: str
) -> None:
    handle = getattr(thorny.on(0), method)(kind)
    for _ in range(2):
        with pytest.raises(WorkerError, match=told) as caught:
            handle.wait(10)
        assert "in thorn" in caught.value.remote_traceback
    assert thorny.plus(1).wait(10) == [1, 1]


def test_an_exception_keeps_its_causes_and_notes_from_process_to_process(thorny: WorkerGroup[Thorny]) -> None:
    with pytest.raises(
        WorkerError, match=r"^thorny\[1\]: WorkerError: thorny\[0\]: ValueError: outer\n"
    ) as caught:
        thorny.on(1).thorn_of(thorny, "caused").wait(10)
    between = caught.value.__cause__
    assert isinstance(between, WorkerError) and (between.group, between.rank) == ("thorny", 0)
    outer = between.__cause__
    assert isinstance(outer, ValueError) and outer.__notes__ == ["in the second epoch"]
    assert isinstance(outer.__cause__, KeyError)
    for once in ("in the second epoch", "KeyError: 'inner'", "in thorn\n", "in thorn_of\n"):
        assert str(caught.value).count(once) == 1, str(caught.value)


def test_several_failures_are_told_once_however_often_they_are_asked_for(thorny: WorkerGroup[Thorny]) -> None:
    handle = thorny.thorn("caused")
    handle.outcomes(10)
    for _ in range(3):
        with pytest.raises(WorkerError) as caught:
            handle.wait(10)
    assert caught.value.__notes__ == ["also failed: thorny[1]: ValueError: outer"]


def test_a_failure_ends_the_wait_before_the_slow_ranks_end(echo: WorkerGroup[Echo]) -> None:
    handle = echo.fail_on(0, 2.0)
    with pytest.raises(WorkerError, match="asked to"):
        handle.wait(10)
    assert not handle.done()
    outcomes = handle.outcomes(30)
    assert [outcome.error is None for outcome in outcomes] == [False, True]


def test_a_passed_deadline_names_the_ranks_it_waits_for(echo: WorkerGroup[Echo]) -> None:
    handle = echo.on(1).sleep(1.0)
    with pytest.raises(StuckError, match=r"echo.sleep has not ended on echo\[1\] within 0.05 s"):
        handle.wait(0.05)
    assert handle.wait(10) == ["slept"]


def test_outcomes_carry_times_and_timers(echo: WorkerGroup[Echo]) -> None:
    for outcome in echo.timed().outcomes(10):
        assert outcome.seconds >= outcome.timers["step"] >= 0.02


def test_an_unknown_method_lists_those_that_exist(echo: WorkerGroup[Echo]) -> None:
    with pytest.raises(AttributeError, match=r"unknown method of Echo 'plu' .did you mean 'plus'"):
        echo.plu(1)


def test_an_argument_that_cannot_travel_is_named_by_its_path(echo: WorkerGroup[Echo]) -> None:
    with pytest.raises(UnpicklableError, match=r"\[0\]\[0\]\['f'\]"):
        echo.echo({"f": lambda: None})


def test_a_result_that_cannot_travel_is_an_error_of_the_call(echo: WorkerGroup[Echo]) -> None:
    with pytest.raises(WorkerError, match="cannot travel"):
        echo.on(0).echo(OneWay()).wait(10)


def test_a_worker_calls_another_group_directly(cluster: Cluster, echo: WorkerGroup[Echo]) -> None:
    other = Echo.launch(cluster, name="other", placement="2-3", base=100, threads=1)
    assert echo.on(0).call_other(other, 5).wait(20) == [[105, 105]]
    other.close()


@pytest.mark.parametrize(
    ("how", "error", "told"),
    [
        ("killed", PeerDiedError, r"waiting\[1\] died (before it was ready|during a call)"),
        ("killed later", PeerDiedError, r"waiting\[1\] died while others of its group started"),
        ("raises", WorkerError, r"waiting\[1\]: ValueError: cannot start"),
    ],
)
def test_a_rank_that_fails_to_start_is_told_while_others_wait_for_it(
    cluster: Cluster, tmp_path: Path, how: str, error: type[RillError], told: str
) -> None:
    """As the ranks of a trainer do, for each other."""
    waiting = Waiting.launch_async(cluster, name="waiting", placement="0-1", how=how, go=str(tmp_path / "go"))
    with pytest.raises(error, match=told):
        waiting.ready(timeout_s=30)
    (tmp_path / "go").touch()
    waiting.close()


def test_a_failing_init_is_raised_by_launch_and_leaves_nothing(cluster: Cluster) -> None:
    with pytest.raises(WorkerError, match="rank 1 cannot start"):
        Echo.launch(cluster, name="broken", placement="0-1", fail_on_rank=1)
    Echo.launch(cluster, name="broken", placement="0").close()


def test_a_launch_with_more_than_can_be_sent_is_refused(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "MAX_LAUNCH_BYTES", 1000)
    with pytest.raises(UserError, match=r"large is launched with \d+ bytes of arguments, 1000 can be sent"):
        Echo.launch(cluster, name="large", placement="0", data=bytes(2000))


def test_wrong_names_and_placements_are_refused(cluster: Cluster, echo: WorkerGroup[Echo]) -> None:
    with pytest.raises(PlanError, match="a group 'echo' already"):
        Echo.launch(cluster, name="echo")
    with pytest.raises(PlanError, match="no device 9"):
        Echo.launch(cluster, name="nine", placement="9")
    with pytest.raises(UserError, match="cannot name a group"):
        Echo.launch(cluster, name="a[0]")


def test_closing_runs_the_workers_own_close(cluster: Cluster, tmp_path: Path) -> None:
    group = Echo.launch(cluster, name="closing", placement="0-1", marker=str(tmp_path / "mark"))
    group.close()
    group.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mark-0", "mark-1"]
    with pytest.raises(RunError, match="closed"):
        group.plus(1)


def test_several_devices_to_a_process_and_several_processes_to_a_device(cluster: Cluster) -> None:
    wide = Echo.launch_async(cluster, name="wide", placement="0-3:0")
    shared = Echo.launch_async(cluster, name="shared", placement="3:0-1")
    assert wide.device_ids().wait(20) == [[0, 1, 2, 3]]
    assert shared.device_ids().wait(20) == [[3], [3]]
    wide.close()
    shared.close()


def test_calls_to_a_stopped_worker_do_not_block_and_run_when_it_goes_on(echo: WorkerGroup[Echo]) -> None:
    (pid,) = echo.on(0).pid().wait(10)
    os.kill(pid, signal.SIGSTOP)
    try:
        started_s = time.monotonic()
        values = [bytes([n % 256]) * 50_000 for n in range(300)]
        handles = [echo.on(0).echo(value) for value in values]
        assert echo.on(1).plus(1).wait(10) == [11]
        assert time.monotonic() - started_s < 5
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [handle.wait(20)[0] for handle in handles] == values


def test_a_dead_worker_fails_its_handle_names_itself_and_can_be_relaunched(cluster: Cluster) -> None:
    group = Echo.launch(cluster, name="mortal", placement="0-1", base=1)
    with pytest.raises(PeerDiedError, match=r"(?s)mortal\[1\].*exit code 7.*last words of the worker"):
        group.on(1).die(7).wait(10)
    assert group.on(0).plus(1).wait(10) == [2]
    with pytest.raises(PeerDiedError, match=r"mortal\[1\] is gone"):
        group.on(1).plus(1).wait(10)
    group.relaunch(1)
    assert group.plus(1).wait(10) == [2, 2]
    assert [address.incarnation for address in group.addresses()] == [0, 1]
    group.close()


def test_a_worker_that_holds_a_group_finds_its_relaunched_rank(cluster: Cluster) -> None:
    mortal = Echo.launch_async(cluster, name="held", placement="0-1", base=1)
    holder = Echo.launch_async(cluster, name="holder", placement="2")
    holder.keep(mortal).wait(20)
    assert holder.call_kept(1).wait(10) == [[2, 2]]
    with pytest.raises(PeerDiedError):
        mortal.on(1).kill_self().wait(10)
    with pytest.raises(WorkerError, match=r"held\[1\] (is gone|died)"):
        holder.call_kept(1).wait(10)
    mortal.relaunch(1)
    assert holder.call_kept(1).wait(10) == [[2, 2]]
    mortal.close()
    holder.close()


def test_a_call_before_a_slow_start_is_over_waits_for_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "KILL_WAIT_S", 0.3)
    group = Slow.launch_async(cluster, name="slow", placement="0", start_s=1.0)
    assert group.on(0).plus(1).wait(20) == [1]
    group.close()


def test_a_concurrent_call_on_a_worker_that_could_not_start_is_told_so(cluster: Cluster) -> None:
    group = Echo.launch_async(cluster, name="unborn", placement="0", fail_on_rank=0)
    with pytest.raises(WorkerError, match="rank 0 cannot start"):
        group.release().wait(30)
    group.close()


def test_deaths_are_noticed_also_when_the_hub_is_lost(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Echo.launch(cluster, name="hubless", placement="0-1")

    def refuse(*_: object, **__: object) -> None:
        raise RunError("driver[0]#0 has no hub any more")

    with monkeypatch.context() as patched:
        patched.setattr(cluster.context.hub, "submit", refuse)
        for rank in (0, 1):  # the second finds out whether whoever hears of deaths has survived the first
            with pytest.raises(PeerDiedError, match="exit code 3"):
                group.on(rank).die(3).wait(10)
    group.close()


def test_a_live_rank_can_be_relaunched(cluster: Cluster) -> None:
    group = Echo.launch(cluster, name="again", placement="0")
    before = group.pid().wait(10)
    group.relaunch(0)
    assert group.pid().wait(10) != before
    group.close()


def test_what_a_worker_started_ends_with_it(cluster: Cluster) -> None:
    group = Echo.launch(cluster, name="parent", placement="0")
    (child,) = group.start_child().wait(10)
    with pytest.raises(PeerDiedError, match="killed by SIGKILL"):
        group.kill_self().wait(10)
    assert becomes_true(lambda: not is_running(child))
    group.close()
