"""Python's collector is as it was once the last engine has gone."""

from __future__ import annotations

import gc

from rill.inference.collector import NEW_CONTAINERS, CollectorHold


def test_the_last_engine_that_goes_leaves_the_collector_as_it_was() -> None:
    before = gc.get_threshold()
    first, second = CollectorHold(), CollectorHold()
    try:
        first.take()
        second.take()
        assert (
            gc.get_threshold() == (max(NEW_CONTAINERS, before[0]), *before[1:]) and gc.get_freeze_count() > 0
        )
        first.give_back()
        first.give_back()
        assert gc.get_threshold()[0] >= NEW_CONTAINERS and gc.get_freeze_count() > 0
    finally:
        second.give_back()
        first.give_back()
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


def test_an_engine_that_never_became_ready_gives_nothing_back() -> None:
    before = gc.get_threshold()
    CollectorHold().give_back()
    assert gc.get_threshold() == before
