"""The two ends of a channel in a process: how puts gather into messages, and how much a consumer is given at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rill.runtime.channels.consumer import ConsumerPort
from rill.runtime.channels.producer import ProducerPort


class FakeHub:
    """Keeps what is submitted; `step` sends it and `confirm` says that the broker has it."""

    def __init__(self) -> None:
        self.queue: list[tuple[str, Any, Callable[[], None] | None]] = []
        self.sent: list[tuple[str, Any, Callable[[], None] | None]] = []

    def submit(
        self, method: str, payload: Any, pending: Any = None, on_confirm: Callable[[], None] | None = None
    ) -> None:
        self.queue.append((method, payload, on_confirm))

    def on(self, topic: str, handler: Callable[[Any], None]) -> None:
        pass

    def add_ticker(self, ticker: Callable[[float], float]) -> None:
        pass

    def step(self) -> list[Any]:
        """What the io thread would send now."""
        out = []
        while self.queue:
            method, payload, on_confirm = self.queue.pop(0)
            payload = payload() if callable(payload) else payload
            if payload is not None:
                self.sent.append((method, payload, on_confirm))
                out.append(payload)
        return out

    def confirm(self) -> None:
        _, _, on_confirm = self.sent.pop(0)
        assert on_confirm is not None
        on_confirm()


def item(n: int) -> list[Any]:
    return [1.0, None, 8, bytes([n]), None]


def producer() -> tuple[FakeHub, ProducerPort]:
    hub = FakeHub()
    return hub, ProducerPort(hub, None, "c")  # type: ignore[arg-type]


def test_a_lone_item_leaves_at_once() -> None:
    hub, port = producer()
    assert port.put(item(0), 1e18)
    assert [len(payload[1]) for payload in hub.step()] == [1]


def test_what_is_put_while_a_message_is_under_way_leaves_as_one_when_it_is_confirmed() -> None:
    hub, port = producer()
    for n in range(100):
        port.put(item(n), 1e18)
        hub.step()
    assert len(hub.sent) == 1
    hub.confirm()
    (payload,) = hub.step()
    assert [one[3] for one in payload[1]] == [bytes([n]) for n in range(1, 100)]
    hub.confirm()
    assert not hub.step() and not port.has_unconfirmed
    port.put(item(0), 1e18)
    assert len(hub.step()) == 1


def test_a_seal_does_not_wait_for_the_message_under_way() -> None:
    hub, port = producer()
    for n in range(3):
        port.put(item(n), 1e18)
        hub.step()
    port.seal()
    assert [len(payload[1]) for payload in hub.step()] == [2]
    hub.confirm()
    hub.confirm()
    assert not port.has_unconfirmed


def test_a_quick_consumer_asks_for_a_millisecond_of_work_and_a_slow_one_for_an_item() -> None:
    hub = FakeHub()
    port = ConsumerPort(hub, None, "c", reads_ahead=True)  # type: ignore[arg-type]
    for pace_s, expected in ((1e-5, (100, 200)), (0.5, (1, 1))):
        port._pace_s = pace_s
        port.request(None, min_items=0, in_loop=True)  # type: ignore[arg-type]
        ((_, min_items, at_once, ahead, _, _),) = hub.step()
        assert min_items == 0 and abs(at_once - expected[0]) <= 1 and abs(ahead - expected[1]) <= 1
