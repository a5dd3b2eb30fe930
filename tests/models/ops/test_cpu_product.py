"""Products in C++, and what runs where they or the compiler are missing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rill.inference.native import model_runner
from rill.models.ops.cpu_kernels import CpuKernels, load_cpu_kernels
from rill.types import PolicyVersion
from tests.inference.native_models import (
    SHAPES,
    forward_logprobs,
    greedy_tokens,
    make_engine,
    prompts,
    reference,
    request,
)

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def kernels() -> CpuKernels:
    loaded = load_cpu_kernels()
    if loaded is None or not loaded.has_products:
        pytest.skip("no C++ compiler, or a processor without AVX-512")
    return loaded


@pytest.fixture
def threads(kernels: CpuKernels) -> Iterator[None]:
    before = kernels.num_threads
    yield
    kernels.num_threads = before


def operands(
    rows: int, k: int, n: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + k)
    x, weight, bias = (torch.randn(size, generator=generator).to(dtype) for size in ((rows, k), (n, k), (n,)))
    return x, weight, bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "k", "n"),
    [(1, 33, 5), (3, 64, 96), (4, 40, 17), (17, 40, 97), (33, 256, 64), (70, 100, 33), (300, 64, 128)],
)
def test_products_of_any_size_are_torchs(
    kernels: CpuKernels, dtype: torch.dtype, rows: int, k: int, n: int
) -> None:
    x, weight, bias = operands(rows, k, n, dtype)
    exact = x.double() @ weight.double().T
    for found, wanted in (
        (kernels.linear(x, weight), exact),
        (kernels.linear(x, weight, bias), exact + bias),
    ):
        tolerance = 2e-5 if dtype is torch.float32 else 2**-8
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance * k**0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_product_has_the_same_bits_in_any_batch_on_any_number_of_threads(
    kernels: CpuKernels, dtype: torch.dtype, threads: None
) -> None:
    x, weight, bias = operands(300, 96, 100, dtype)
    kernels.num_threads = 1
    whole = kernels.linear(x, weight, bias)
    kernels.num_threads = 2
    for start, end in ((0, 1), (5, 8), (7, 24), (100, 133), (299, 300), (0, 300)):
        assert torch.equal(kernels.linear(x[start:end], weight, bias), whole[start:end])


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "qwen2-window"])
def test_in_bfloat16_it_is_as_close_to_the_truth_as_the_modules_are(kernels: CpuKernels, name: str) -> None:
    model = reference(name, torch.bfloat16)
    tokens = prompts((50, 33, 7))
    with torch.no_grad():
        exact = [forward_logprobs(model.float(), t) for t in tokens]
    errors = {}
    for fast_path in (True, False):
        engine = make_engine(name, dtype="bfloat16", fast_path=fast_path)
        try:
            scores = engine.score(tokens, timeout_s=60)
        finally:
            engine.close()
        errors[fast_path] = float(np.mean([np.abs(s - e).mean() for s, e in zip(scores, exact)]))
    assert errors[True] < 1.25 * errors[False] + 1e-3, errors


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize("missing", ["products", "compiler"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_them_the_tokens_are_the_same(
    name: str, missing: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_cpu_kernels()
    if missing == "compiler" or loaded is None:
        monkeypatch.setattr(model_runner, "load_cpu_kernels", lambda: None)
    else:
        monkeypatch.setattr(loaded, "has_products", False)
    if dtype == "bfloat16":
        engine = make_engine(name, dtype=dtype)  # the check at load compares it with the modules
        engine.close()
        return
    engine = make_engine(name)
    try:
        inputs = prompts((5, 33, 1))
        done = engine.generate([request(i, p) for i, p in enumerate(inputs)], timeout_s=60)
        assert [c.token_ids.tolist() for c in done] == [greedy_tokens(reference(name), p, 12) for p in inputs]
    finally:
        engine.close()


def test_parameters_that_moved_are_read_where_they_are_after_an_update() -> None:
    from rill.inference.native.engine import NativeEngine
    from rill.models.loading import ModelConfig

    model = reference("llama")
    config = NativeEngine.Config(model=ModelConfig(shape=SHAPES["llama"]), num_kv_blocks=32, max_num_seqs=4)
    engine = NativeEngine(config, model=model)
    try:
        (prompt,) = prompts((9,))
        for version in (1, 2):
            for parameter in model.parameters():
                parameter.data = parameter.data * 1.2  # a new storage; the old one is gone
            engine.update_weights([], PolicyVersion(version), partial=True)
            [completion] = engine.generate([request(version, prompt)])
            assert completion.token_ids.tolist() == greedy_tokens(model, prompt, 12)
    finally:
        engine.close()
