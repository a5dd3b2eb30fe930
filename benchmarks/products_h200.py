"""The products of a layer and decode attention on one H200, bf16 and FP8, by every way there is.

    python benchmarks/products_h200.py

Prints one JSON line per shape: microseconds each, and the relative error of those that can be compared. The last line
is what 256 x (128 + 256) tokens could take at the least with these kernels: of each product and of attention the
fastest one, prompts at the rate of one large product, and nothing for whatever else a step does.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from inference_h200 import NUM_PARAMETERS, ceiling_of_products
from report import report
from shapes import QWEN_1_5B


def all_products() -> None:
    """µs each by replay of a graph; every product has a weight of its own, so that none is found in the cache."""
    torch.manual_seed(0)
    least: dict[str, float] = {}
    for name, num_out, num_in in (
        ("qkv", 2048, 1536), ("out", 1536, 1536), ("gate_up", 17920, 1536), ("down", 1536, 8960),
        ("head", 151936, 1536),
    ):  # fmt: skip
        count = max(3, min(24, 240_000_000 // (2 * num_out * num_in)))
        weights = [torch.randn(num_out, num_in, device="cuda").mul_(0.02).bfloat16() for _ in range(count)]
        is_head = name == "head"  # the library's, in bf16
        for rows in (256,) if is_head else (16, 64, 256, 4096):
            products = Products(weights, rows, is_gated=name == "gate_up")
            variants = {"bf16": products.bf16} if is_head else products.variants()
            figures = measure_products(name, rows, products.wanted(), variants, count)
            if rows == 256:
                least[name] = least_of(figures)
    least["attention"] = attention()
    layer_us = sum(us for name, us in least.items() if name != "head")
    step_us = least["head"] + QWEN_1_5B["num_hidden_layers"] * layer_us
    rate = ceiling_of_products()
    seconds = 2 * NUM_PARAMETERS * 256 * 128 / (rate * 1e12) + 256 * step_us / 1e6
    report(
        result="the least that 256 x (128 + 256) takes by these kernels, all else free", us=least,
        step_ms=round(step_us / 1000, 3), prompts_at_tflop_per_s=rate, tokens_per_s=round(256 * 256 / seconds),
    )  # fmt: skip


def least_of(figures: dict[str, Any]) -> float:
    """Of those in bf16."""
    return min(us[0] for label, us in figures.items() if "bf16" in label and isinstance(us, list))


def attention() -> float:
    """Decode attention of 256 sequences with 256 tokens each, as many as those of the least have in the mean, over keys
    and values of 16 and of 8 bits."""
    from rill.models.decode.attention_paged import LayerCache
    from rill.models.decode.decode_work import DecodeWork, work_in_runs
    from rill.models.eager import ScoreRule
    from rill.models.ops.triton_decode import DecodeAttention

    rows, tokens, layers = 256, 256, 4
    blocks = -(-tokens // 16)
    numbers = np.arange(rows, dtype=np.int32)
    entries, _, runs = work_in_runs(np.full(rows, tokens, dtype=np.int32), numbers, rows)
    work = DecodeWork(torch.from_numpy(entries).cuda(), runs, None)
    tables = torch.arange(1, rows * blocks + 1, dtype=torch.int32, device="cuda").view(rows, blocks)
    query = torch.randn(rows, 16 * 128, device="cuda").bfloat16()
    size = (layers, 2, rows * blocks + 1, 16, 2, 128)
    cache = torch.randn(size, device="cuda").bfloat16()
    attend = DecodeAttention(
        num_heads=12, num_kv_heads=2, head_dim=128, max_rows=rows, device=torch.device("cuda", 0)
    )

    def run(i: int, *, held: torch.Tensor, uses_copies: bool) -> torch.Tensor:
        attend.uses_copies = uses_copies
        out = torch.empty(rows, 12, 128, dtype=torch.bfloat16, device="cuda")
        attend(query, LayerCache(*held[i]), tables, work, out, ScoreRule(128**-0.5))
        return out.view(rows, -1)

    wanted = run(0, held=cache, uses_copies=False).float()
    variants = {
        "bf16, Triton": functools.partial(run, held=cache, uses_copies=False),
        "bf16, CUDA C++": functools.partial(run, held=cache, uses_copies=True),
        "fp8": functools.partial(run, held=cache.to(torch.float8_e4m3fn), uses_copies=False),
    }
    return least_of(measure_products("attention", rows, wanted, variants, layers))


class Products:
    """One product of a layer, by every way there is. Each takes the number of its weight."""

    def __init__(self, weights: list[torch.Tensor], rows: int, *, is_gated: bool) -> None:
        self.weights, self.rows, self.is_gated = weights, rows, is_gated
        self.num_out, self.num_in = weights[0].shape
        self.quantized = [self._quantized(w) for w in weights]
        self.one = torch.ones((), device="cuda")
        self.bias = torch.zeros(self.num_out, device="cuda", dtype=torch.bfloat16)
        self.x = torch.randn(rows, self.num_in, device="cuda").bfloat16()
        self.x8, self.x_scales = self._quantized(self.x)

    @staticmethod
    def _quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from rill.models.ops.triton_fp8 import quantize_into

        values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
        scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
        quantize_into(x, values, scales)
        return values, scales

    def wanted(self) -> torch.Tensor:
        return torch.nn.functional.linear(self.x.float(), self.weights[0].float())

    def bf16(self, i: int) -> torch.Tensor:
        return torch.nn.functional.linear(self.x, self.weights[i])

    def rows_scaled(self, i: int, *, fast: bool, bias: torch.Tensor | None = None) -> torch.Tensor:
        values, scales = self.quantized[i]
        return torch._scaled_mm(
            self.x8, values.t(), scale_a=self.x_scales[:, None], scale_b=scales[None], bias=bias,
            out_dtype=torch.bfloat16, use_fast_accum=fast,
        )  # fmt: skip

    def whole_scaled(self, i: int) -> torch.Tensor:
        return torch._scaled_mm(
            self.x8, self.quantized[i][0].t(), scale_a=self.one, scale_b=self.one, out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )  # fmt: skip

    def quantize(self, i: int) -> None:
        from rill.models.ops.triton_fp8 import quantize_into

        quantize_into(self.x, self.x8, self.x_scales)

    def quantize_and_scaled(self, i: int) -> torch.Tensor:
        self.quantize(i)
        return self.rows_scaled(i, fast=True)

    def ours(self, i: int, *, is_fp8: bool, shape: Any) -> torch.Tensor:
        from rill.models.ops.fp8 import Fp8Rows
        from rill.models.ops.triton_skinny import product

        options: dict[str, Any] = {"dtype": torch.float32}
        if self.is_gated:
            options = {"dtype": torch.bfloat16, "is_gelu": False}
        if not is_fp8:
            return product(self.x, self.weights[i], shape, **options)
        values, scales = self.quantized[i]
        return product(Fp8Rows(self.x8, self.x_scales), values, shape, scales_N=scales, **options)

    def ours_on_hopper(self, i: int) -> torch.Tensor:
        from rill.models.decode.hopper import product

        return product(self.x, self.weights[i], is_gelu=False if self.is_gated else None)

    def variants(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "bf16": self.bf16,
            **({"ours bf16, CUDA C++": self.ours_on_hopper} if 16 < self.rows <= 256 else {}),
            "row-wise, fast accumulation": functools.partial(self.rows_scaled, fast=True),
            "row-wise": functools.partial(self.rows_scaled, fast=False),
            "row-wise, fast, bias": functools.partial(self.rows_scaled, fast=True, bias=self.bias),
            "quantise, row-wise, fast": self.quantize_and_scaled,
            "per tensor, fast": self.whole_scaled,
            "quantise alone": self.quantize,
        }
        if self.rows > 256 or (self.rows == 256 and self.is_gated):
            return found
        tiles = {
            16: [(64 if self.is_gated else 128, 128, 4, 4), (64 if self.is_gated else 128, 256, 3, 4)],
            64: [(64, 128, 4, 4), (64, 256, 3, 4)],
            256: [(128, 128, 3, 8), (64, 128, 4, 4)],
        }[self.rows]
        for tile_n, tile_k, num_stages, num_warps in tiles:
            shape = self._shape(tile_n, tile_k, num_stages, num_warps)
            for is_fp8 in (True, False) if tile_k == 128 and self.rows < 256 else (True,):
                kind = "fp8" if is_fp8 else "bf16"
                label = f"ours {kind}, tile {tile_n} x {tile_k}, {shape.num_parts} parts, {num_stages} stages"
                found[label] = functools.partial(self.ours, is_fp8=is_fp8, shape=shape)
        return found

    def _shape(self, tile_n: int, tile_k: int, num_stages: int, num_warps: int) -> Any:
        from rill.models.ops.triton_skinny import ProductShape

        if self.is_gated:
            return ProductShape(1, tile_n, tile_k, num_stages, num_warps, 0)
        num_blocks = self.num_in // tile_k
        num_parts = min(max(1, 132 // -(-self.num_out // tile_n)), num_blocks)
        num_parts = -(-num_blocks // -(-num_blocks // num_parts))
        prefetch = (4 << 20) // (self.num_out * num_parts) // 128 * 128
        return ProductShape(num_parts, tile_n, tile_k, num_stages, num_warps, prefetch)


def measure_products(
    name: str, rows: int, wanted: Any, variants: dict[str, Any], count: int
) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for label, call in variants.items():
        try:
            out = call(0)
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                call(1)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    for i in range(count):
                        call(i)
            graph.replay()
            torch.cuda.synchronize()
            repeats = 8
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(repeats):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            figures[label] = [round(1000 * begin.elapsed_time(end) / (repeats * count), 2)]
            if out is not None:
                out = out.float().sum(0) if out.ndim == 3 else out.float()
                if out.shape == wanted.shape:  # a gated product has half the width
                    figures[label].append(round(float((out - wanted).norm() / wanted.norm()), 4))
        except Exception as error:  # noqa: BLE001 boundary: a variant that fails must not hide the others' figures
            figures[label] = f"{type(error).__name__}: {error}"[:200]
    report(product=name, rows=rows, us_and_error=figures)
    return figures


if __name__ == "__main__":
    if torch.cuda.is_available():
        all_products()
    else:
        report(skipped="needs a CUDA device")
