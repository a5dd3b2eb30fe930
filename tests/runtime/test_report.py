"""The stuck-run report: who waits for whom, the ring, the stacks; and that one is enough."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from pathlib import Path

import pytest

from rill.errors import StuckError, WorkerError
from rill.runtime.channel import Channel
from rill.runtime.cluster import Cluster
from rill.runtime.process import report as report_module
from rill.runtime.process.report import Edge, Report
from rill.runtime.process.waits import dump, waiting, watch_loop
from tests.runtime.channel_workers import Consumer, Producer
from tests.runtime.leftovers import own_waits

pytestmark = pytest.mark.timeout(90)


def edge(waiter: str, needed: str) -> Edge:
    return Edge(waiter, needed, f"channel {waiter}{needed}", 1.5)


def test_a_ring_is_found_and_named() -> None:
    report = Report(edges=[edge("x", "a"), edge("a", "b"), edge("b", "c"), edge("c", "a")])
    assert sorted(report.cycle()) == ["a", "b", "c"]
    assert "ring: " in report.summary()


def test_a_chain_is_not_a_ring() -> None:
    report = Report(edges=[edge("a", "b"), edge("b", "c"), edge("a", "c")])
    assert report.cycle() == []


def test_a_named_wait_is_visible_while_it_lasts() -> None:
    with waiting("an answer from the moon", "moon"):
        assert own_waits() == [["an answer from the moon", "moon"]]
        assert "test_a_named_wait" in "".join(dump()["stacks"].values())
    assert own_waits() == []


def test_a_stuck_take_reports_everybody_with_their_stacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(report_module, "REPORT_FROM_S", 0.5)
    with Cluster(devices="cpu:2", log_dir=tmp_path) as cluster:
        consumers = Consumer.launch(cluster, name="consumer", placement="0")
        producers = Producer.launch(cluster, name="producer", placement="1")
        prompts, answers = Channel.create(cluster, "prompts"), Channel.create(cluster, "answers")
        producers.produce(answers, 1).wait(timeout_s=30)
        answers.take()
        waiting_worker = consumers.take_forever(prompts, 20.0)
        with pytest.raises(StuckError) as stuck:
            answers.take(timeout_s=1.0)
        message = str(stuck.value)
        assert "driver[0] waits for producer[0] on take on channel answers" in message
        assert "consumer[0] waits for nobody yet on take on channel prompts" in message
        path = Path(re.search(r"\S+\.md", message)[0])  # type: ignore[index]
        text = path.read_text()
        assert "take_forever" in text and "## consumer[0]" in text
        with pytest.raises(StuckError) as again:
            answers.take(timeout_s=1.0)
        assert f"{path}, written for another wait" in str(again.value)
        assert len(list(tmp_path.glob("stuck-*.md"))) == 1, "one report is enough"
        prompts.close()
        with pytest.raises(WorkerError, match="prompts"):
            waiting_worker.wait(timeout_s=30)


@pytest.mark.parametrize("has_log_dir", [True, False])
def test_the_report_outlives_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_log_dir: bool
) -> None:
    monkeypatch.setattr(report_module, "REPORT_FROM_S", 0.1)
    folder = tmp_path / "logs" if has_log_dir else Path(tempfile.gettempdir()) / f"rill-reports-{os.getuid()}"
    with Cluster(devices="cpu:1", log_dir=tmp_path / "logs" if has_log_dir else None) as cluster:
        channel = Channel.create(cluster, "empty")
        with pytest.raises(StuckError) as caught:
            channel.take(timeout_s=0.2)
    path = Path(re.search(r"\S+\.md", str(caught.value))[0])  # type: ignore[index]
    assert path.parent == folder and path.exists()
    path.unlink()


async def slow_tool(until: asyncio.Event) -> None:
    await until.wait()


async def test_a_dump_shows_where_the_tasks_of_a_watched_loop_wait() -> None:
    until = asyncio.Event()
    watch_loop(asyncio.get_running_loop())
    tasks = [asyncio.create_task(slow_tool(until)) for _ in range(3)]
    await asyncio.sleep(0)
    shown = (await asyncio.to_thread(dump))["stacks"]["tasks"]
    assert "3 task(s) at" in shown
    assert "test_report.py" in shown and "in slow_tool" in shown
    until.set()
    await asyncio.gather(*tasks)
