"""The native engine under the suite that every engine runs: in this process, and as replicas behind a router."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rill.inference.base import Engine
from rill.inference.native.engine import NativeEngine
from rill.inference.server.router import Router, RouterConfig
from rill.models.loading import ModelConfig
from tests.inference.conformance import EngineConformance
from tests.inference.native_models import SHAPES, make_engine, reference


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


@pytest.mark.slow
@pytest.mark.timeout(400)
class TestNativeReplicas(TestNative):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Iterator[Engine]:
        model = ModelConfig(shape=SHAPES["llama"])
        config = NativeEngine.Config(model=model, device="cpu", num_kv_blocks=64, max_num_seqs=8)
        router = Router(config, RouterConfig(num_replicas=2))
        yield router
        router.close()
