"""The run that others are compared with."""

from __future__ import annotations

import pytest

from rill.telemetry.run import Run
from tests.e2e.tiny import EXACT, start


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Undisturbed, on one shared device."""
    return start(tmp_path_factory.mktemp("whole"), "whole", *EXACT)
