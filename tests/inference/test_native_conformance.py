"""The native engine under the suite that every engine runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rill.inference.base import Engine
from tests.inference.conformance import EngineConformance
from tests.inference.native_models import make_engine, reference


class TestNative(EngineConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Iterator[Engine]:
        engine = make_engine()
        yield engine
        engine.close()

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls) -> Any:
        return reference()


class TestNativeBatchInvariant(TestNative):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Iterator[Engine]:
        engine = make_engine(batch_invariant=True)
        yield engine
        engine.close()
