"""Kernels for steps of few rows, against plain torch in higher precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
DTYPES = [torch.float32, torch.bfloat16]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert torch.isfinite(found).all()
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def randn(*size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(size))
    return torch.randn(*size, generator=generator, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 16, 33, 64])
@pytest.mark.parametrize(("num_out", "num_in", "num_parts"), [(96, 1536, 5), (2048, 640, 1), (1000, 256, 2)])
def test_parts_of_a_product_add_up(
    dtype: torch.dtype, rows: int, num_out: int, num_in: int, num_parts: int
) -> None:
    from rill.models.ops.triton_skinny import ProductShape, product

    x, weight = randn(rows, num_in, dtype=dtype), randn(num_out, num_in, dtype=dtype)
    shape = ProductShape(
        num_parts=num_parts,
        tile_n=64,
        tile_k=128 if dtype is torch.bfloat16 else 16,
        num_stages=3,
        num_warps=4,
        prefetch_bytes=1024,
    )
    parts = product(x, weight, shape, dtype=torch.float32)
    assert error(parts.sum(0), x.double() @ weight.double().T) < TOLERANCE[dtype]
    for row in {0, rows - 1}:
        alone = product(x[row : row + 1], weight, shape, dtype=torch.float32)
        assert torch.equal(alone[:, 0], parts[:, row]), "a row's bits depend on the others"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gelu", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(3, 48), (64, 8960)])
def test_a_gated_product_is_its_two_products_and_the_activation(
    dtype: torch.dtype, is_gelu: bool, rows: int, size: int
) -> None:
    from rill.models.ops.triton_skinny import ProductShape, product

    x, weight = randn(rows, 256, dtype=dtype), randn(2 * size, 256, dtype=dtype)
    shape = ProductShape(
        num_parts=1, tile_n=64, tile_k=64 if dtype is torch.bfloat16 else 16, num_stages=3, num_warps=4,
        prefetch_bytes=0,
    )  # fmt: skip
    gate, up = (x.double() @ weight.double().T).to(dtype).chunk(2, dim=1)
    act = torch.nn.functional.gelu(gate, approximate="tanh") if is_gelu else torch.nn.functional.silu(gate)
    found = product(x, weight, shape, dtype=dtype, is_gelu=is_gelu)[0]
    assert error(found, act * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_seqs", [12, 30, 150, 400], ids=["few", "some", "many", "most"])
@pytest.mark.parametrize("has_post_norm", [False, True])
@torch.no_grad()
def test_sampled_by_few_rows_and_scored_by_many_is_the_same(has_post_norm: bool, num_seqs: int) -> None:
    """A model wide enough for real tiles, through the paths for few rows and for some more (sampling), and the one for
    any number (scoring)."""
    from rill.inference.native.engine import NativeEngine
    from rill.models.loading import ModelConfig
    from tests.inference.native_models import SHAPES, prompts, request

    shape = SHAPES["gemma2" if has_post_norm else "qwen2"] | {
        "hidden_size": 512, "intermediate_size": 1408, "head_dim": 128, "initializer_range": 0.05,
    }  # fmt: skip
    engine = NativeEngine(
        NativeEngine.Config(
            model=ModelConfig(shape=shape | {"max_position_embeddings": 512}), device="cuda", num_kv_blocks=1200,
            max_num_seqs=num_seqs + 3, max_batched_tokens=512,
        )
    )  # fmt: skip
    try:
        runner: Any = engine._runner
        is_wide = num_seqs > 13 and torch.cuda.get_device_capability() == (9, 0)
        assert runner._skinny is not None
        assert (runner._wide is not None) is is_wide
        inputs = prompts((40, 300, 7, 129, *([5] * (num_seqs - 4))), seed=3)
        batch = [request(i, p, max_new_tokens=24, seed=i, temperature=1.0) for i, p in enumerate(inputs)]
        done = engine.generate(batch, timeout_s=110)
        whole = [np.concatenate([p, c.token_ids]) for p, c in zip(inputs, done)]
        for prompt, completion, scores in zip(inputs, done, engine.score(whole), strict=True):
            difference = abs(scores[len(prompt) :] - completion.logprobs)
            assert difference.max() < 0.1 and difference.mean() < 0.02, "more than bf16 rounds"
    finally:
        engine.close()
