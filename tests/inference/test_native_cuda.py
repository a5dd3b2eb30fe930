"""The native engine on a CUDA device: same answers, overlapped and from graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rill.inference.base import Engine
from tests.inference.conformance import EngineConformance
from tests.inference.native_models import (
    SHAPES,
    forward_logprobs,
    greedy_tokens,
    make_engine,
    prompts,
    reference,
    request,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("fast_path", [True, False], ids=["fused", "modules"])
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_greedy_tokens_and_logprobs_are_those_of_transformers(name: str, fast_path: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = reference(name)
    engine = make_engine(name, device="cuda", dtype="float32", fast_path=fast_path, check_every_step=False)
    try:
        inputs = prompts((5, 16, 33, 40, 40, 1))
        for prompt, done in zip(
            inputs, engine.generate([request(i, p) for i, p in enumerate(inputs)], timeout_s=110)
        ):
            assert done.token_ids.tolist() == greedy_tokens(model, prompt, 12)
            whole = np.concatenate([prompt, done.token_ids])
            np.testing.assert_allclose(
                done.logprobs, forward_logprobs(model, whole)[len(prompt) :], atol=1e-4
            )
    finally:
        engine.close()


class TestNativeCuda(EngineConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Iterator[Engine]:
        torch.backends.cuda.matmul.allow_tf32 = False
        engine = make_engine(device="cuda", dtype="float32", check_every_step=False)
        yield engine
        engine.close()

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls) -> Any:
        return reference()


class TestNativeCudaInvariant(TestNativeCuda):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Iterator[Engine]:
        engine = make_engine(device="cuda", dtype="float32", batch_invariant=True, check_every_step=False)
        yield engine
        engine.close()
