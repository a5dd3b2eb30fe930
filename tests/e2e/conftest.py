"""The run that others are compared with, and time for whole runs on a machine that is busy."""

from __future__ import annotations

from pathlib import Path

import pytest

from rill.telemetry.run import Run
from tests.e2e.tiny import EXACT, start

RUNS_S = 300
"""For a test of this folder that does not say itself; with the first of them comes `whole`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(RUNS_S))


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Undisturbed, on one shared device."""
    return start(tmp_path_factory.mktemp("whole"), "whole", *EXACT)
