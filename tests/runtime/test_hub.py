"""The hub as a process: calls, deaths, and being killed itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from rill.errors import ConfigError, PeerDiedError, RunError, StuckError
from rill.runtime.address import STORE_GROUP, Site, WorkerAddress
from rill.runtime.context import RuntimeContext
from rill.runtime.hub import journal as hub_journal
from rill.runtime.hub.client import HubClient
from rill.runtime.hub.journal import HubJournal
from rill.runtime.hub.messages import ChannelOptions, Grant, Requests
from rill.runtime.process.call import encode_arguments
from tests.runtime.hub_fakes import FakeHub, HubProcess, hub_process, put, take, values_of

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    with hub_process(tmp_path) as process:
        yield process


@pytest.fixture
def client(hub: HubProcess) -> Iterator[HubClient]:
    client = HubClient(hub.endpoint, "driver[0]#0").start()
    yield client
    client.close()


def test_an_address_can_be_waited_for_before_it_is_told(hub: HubProcess, client: HubClient) -> None:
    other = HubClient(hub.endpoint, "w[0]#0").start()
    found: list[object] = []
    waiter = threading.Thread(target=lambda: found.append(other.call("registry.find", "driver[0]", 20)))
    waiter.start()
    client.call("registry.join", "tcp://5", 20)
    waiter.join(20)
    other.close()
    assert found == ["tcp://5"]


def test_a_search_that_gave_up_is_waited_for_by_nobody(client: HubClient) -> None:
    with pytest.raises(StuckError, match="registry.find"):
        client.call("registry.find", "driver[0]", 0.05)
    client.call("registry.sync", None, 20)
    assert not client._asked
    client.call("registry.join", 1, 20)
    assert client.call("registry.find", "driver[0]", 20) == 1


def test_who_has_something_to_tell_a_hub_that_was_given_up_ends_nobody_elses_work(client: HubClient) -> None:
    """As a consumer whose last view of an item's memory goes then; others hear on the same thread of memory to free."""
    served = threading.Event()
    client.abandon("it ended too often")
    with pytest.raises(RunError, match="ended too often"):
        client.call("registry.sync", None, 20)
    client.add_ticker(lambda _: client.submit("broker.release", None) or 0.01)  # type: ignore[func-returns-value]
    client.add_ticker(lambda _: served.set() or 0.01)  # type: ignore[func-returns-value]
    served.wait(5)
    served.clear()
    assert served.wait(5)


def test_a_refusal_arrives_as_the_error_it_names(client: HubClient) -> None:
    client.call("broker.create", ChannelOptions("c"), 20)
    with pytest.raises(ConfigError, match="choose another name"):
        client.call("broker.create", ChannelOptions("c"), 20)


def test_something_that_cannot_be_sent_fails_by_itself_and_keeps_the_line_open(client: HubClient) -> None:
    with pytest.raises(RunError, match="cannot be sent"):
        client.call("registry.join", object(), 20)
    client.call("registry.join", 1, 20)
    assert client.call("registry.find", "driver[0]", 20) == 1


def test_an_unknown_method_is_refused_and_the_hub_goes_on(client: HubClient) -> None:
    with pytest.raises(RunError, match="no_such"):
        client.call("broker.no_such", None, 20)
    assert "driver[0]#0" in client.call("registry.members", None, 20)


def test_a_wait_for_the_hub_has_a_deadline(tmp_path: Path) -> None:
    nobody = HubClient(f"ipc://{tmp_path}/none.sock", "driver[0]#0").start()
    with pytest.raises(StuckError, match=r"registry\.sync within 0\.3 s"):
        nobody.call("registry.sync", None, 0.3)
    nobody.close()


def test_a_relaunched_rank_ends_its_earlier_self(hub: HubProcess, client: HubClient) -> None:
    first = HubClient(hub.endpoint, "w[0]#0").start()
    first.call("registry.sync", None, 20)
    second = HubClient(hub.endpoint, "w[0]#1").start()
    second.call("registry.sync", None, 20)
    with pytest.raises((PeerDiedError, RunError), match="takes this process for dead"):
        first.call("registry.sync", None, 20)
    first.close()
    second.close()


def test_who_has_ended_is_not_waited_for_but_a_store_server_is(hub: HubProcess, client: HubClient) -> None:
    for name in ("w[0]", f"{STORE_GROUP}node1[0]"):
        first = HubClient(hub.endpoint, f"{name}#0").start()
        first.call("registry.join", 7, 20)
        assert client.call("registry.find", name, 20) == 7
        client.submit("registry.died", [f"{name}#0", "killed by SIGKILL"])
        error, said = (PeerDiedError, "is gone: killed") if name == "w[0]" else (StuckError, "registry.find")
        with pytest.raises(error, match=said):
            client.call("registry.find", name, 20 if error is PeerDiedError else 0.2)
        first.close()
        again = HubClient(hub.endpoint, f"{name}#1").start()
        again.call("registry.join", 8, 20)
        assert client.call("registry.find", name, 20) == 8
        again.close()


def test_a_process_that_is_slow_to_start_hears_of_those_who_died_before_it_and_calls_none_of_them(
    hub: HubProcess, client: HubClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = HubClient(hub.endpoint, "w[0]#0").start()
    lost.sync(20)
    client.submit("registry.died", ["w[0]#0", "killed by SIGKILL"])
    client.sync(20)
    monkeypatch.setattr(  # the machine is busy: it is held up between two lines of its start
        "rill.runtime.context.Recorder", lambda *_: time.sleep(0.3) or SimpleNamespace(close=lambda: None)
    )
    site = Site(session_dir=tmp_path, shm_dir=tmp_path, node_id="node", hub_endpoint=hub.endpoint)
    late = RuntimeContext(site, WorkerAddress("late", 0, "node"))
    late.hub.sync(20)
    gone = WorkerAddress("w", 0, "node", endpoint=f"ipc://{tmp_path}/gone")
    handle = late.call("w", "update", [gone], encode_arguments((), {}))
    with pytest.raises(PeerDiedError, match=r"w\[0\] is gone: killed by SIGKILL"):
        handle.wait(timeout_s=20)
    late.close()
    lost.close()


def test_killing_the_hub_loses_no_call_and_repeats_none(hub: HubProcess, client: HubClient) -> None:
    """Three threads put while the hub is killed again and again: each item arrives once, in its thread's order."""
    client.call("broker.create", ChannelOptions("c"), 20)
    num_each = 400

    def produce(n: int) -> None:
        for k in range(num_each):
            client.call("broker.commit", put(n * num_each + k, wants_reply=True), 30)

    threads = [threading.Thread(target=produce, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        time.sleep(0.25)
        hub.kill()
        hub.start()
    for thread in threads:
        thread.join(50)
    asked = client.ask("broker.take", take(3 * num_each, in_loop=False), Grant)
    values = values_of(asked.result(20))
    assert sorted(values) == list(range(3 * num_each))
    for n in range(3):
        own = [v for v in values if v // num_each == n]
        assert own == sorted(own)


def test_an_answer_that_the_hub_owed_when_it_was_killed_still_comes(
    hub: HubProcess, client: HubClient
) -> None:
    other = HubClient(hub.endpoint, "w[0]#0").start()
    found: list[object] = []
    waiter = threading.Thread(target=lambda: found.append(other.call("registry.find", "driver[0]", 30)))
    waiter.start()
    time.sleep(0.3)
    hub.kill()
    client.submit("registry.join", 7)
    hub.start()
    waiter.join(30)
    other.close()
    assert found == [7]


# --- the journal ------------------------------------------------------------------------------------------


def encoded(first_seq: int, *requests: list[object]) -> bytes:
    return msgspec.msgpack.encode([first_seq, 0, requests])


def test_a_torn_record_is_dropped_and_the_rest_is_kept(tmp_path: Path) -> None:
    journal = HubJournal(tmp_path)
    journal.recover()
    journal.append("a[0]#0", encoded(1, ["registry.join", None], ["registry.join", 1]), 1.0)
    journal.commit()
    journal.append("a[0]#0", encoded(3, ["registry.join", 2]), 2.0)
    journal.commit()
    journal.close()
    log = tmp_path / "hub.0.log"
    log.write_bytes(log.read_bytes()[:-3])
    machine = HubJournal(tmp_path).recover()
    assert machine.membership.members == {"a[0]#0": 1}
    assert machine.expected("a[0]#0") == 3


def test_compaction_keeps_the_state_and_drops_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_journal, "GROWN_BYTES", 2000)
    journal = HubJournal(tmp_path)
    machine = journal.recover()
    num_compacted = 0
    for n in range(200):
        raw = encoded(n + 1, ["registry.join", n])
        journal.append("a[0]#0", raw, float(n))
        machine.apply("a[0]#0", n + 1, msgspec.msgpack.decode(raw, type=Requests).requests, float(n))
        machine.streams["a[0]#0"].confirm(10**9)
        journal.commit()
        if journal.is_grown:
            journal.compact(machine)
            num_compacted += 1
    journal.close()
    assert num_compacted > 0
    assert len(list(tmp_path.glob("hub.*.log"))) == 1
    again = HubJournal(tmp_path).recover()
    assert again.membership.members == machine.membership.members
    assert again.expected("a[0]#0") == 201


def test_a_death_before_joining_is_told_to_all_and_to_those_who_join_later() -> None:
    fake = FakeHub()
    fake.join("driver[0]#0")
    fake.join("w[0]#0")
    fake.send("driver[0]#0", "registry.died", ["w[1]#0", "exit code 9"])
    fake.join("late[0]#0")
    for client in ("w[0]#0", "late[0]#0"):
        notes = [body["identity"] for topic, body in fake.pushes[client] if topic == "peer_died"]
        assert notes == ["w[1]#0"]
    fake.join("w[1]#1")
    fake.join("later[0]#0")
    assert "later[0]#0" not in fake.pushes, "a rank that came back is no longer dead"
