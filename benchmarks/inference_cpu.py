"""The native engine on the CPU beside transformers' generate (and vLLM's CPU build where it is installed).

    python benchmarks/inference_cpu.py [--requests 64] [--tokens 128] [--threads N] [--dtype float32]

Prints one JSON line per system: tokens per second for `requests` sampled completions of `tokens` tokens, and the
time to the first token of a single request. The model is a fresh Llama shape of about 30 M parameters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import torch

from rill.inference.base import Request
from rill.inference.native.engine import NativeEngine
from rill.models.loading import ModelConfig, load_model
from rill.types import SamplingParams

SHAPES: dict[str, dict[str, Any]] = {
    "10M": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 4},
    "30M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8},
    "60M": {
        "hidden_size": 640,
        "intermediate_size": 1920,
        "num_hidden_layers": 10,
        "num_attention_heads": 10,
    },
}


def shape(name: str) -> dict[str, Any]:
    return SHAPES[name] | {
        "model_type": "llama",
        "num_key_value_heads": SHAPES[name]["num_attention_heads"] // 2,
        "vocab_size": 8192,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }


def report(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def make_requests(prompts: list[Any], tokens: int, tag: str) -> list[Request]:
    return [
        Request(
            id=f"{tag}{i}",
            token_ids=p,
            sampling=SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=i),
        )
        for i, p in enumerate(prompts)
    ]


def run_native(model: ModelConfig, prompts: list[Any], tokens: int, dtype: Any, **options: Any) -> float:
    engine = NativeEngine(
        NativeEngine.Config(
            model=model, dtype=dtype, device="cpu", max_num_seqs=len(prompts), num_kv_blocks=2048, **options
        )
    )
    engine.generate(make_requests(prompts[:4], 4, "warm"))
    rates = []
    for attempt in range(3):
        start = time.perf_counter()
        done = engine.generate(make_requests(prompts, tokens, f"run{attempt}-"))
        rates.append(sum(len(c.token_ids) for c in done) / (time.perf_counter() - start))
        engine.flush()
    first = []
    for attempt in range(5):
        start = time.perf_counter()
        engine.generate(make_requests(prompts[:1], 1, f"first{attempt}-"))
        first.append(time.perf_counter() - start)
        engine.flush()
    engine.close()
    report(
        system="rill native", dtype=dtype, options=options, tokens_per_s=round(max(rates)),
        first_token_ms=round(1000 * statistics.median(first), 1),
    )  # fmt: skip
    return max(rates)


def run_transformers(model: ModelConfig, prompts: list[Any], tokens: int, dtype: Any) -> float:
    module = load_model(model, dtype=getattr(torch, dtype), attention="sdpa")
    ids = torch.tensor(np.stack(prompts)).long()

    def once(num_tokens: int) -> None:
        module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=True,
            pad_token_id=0,
        )

    once(4)
    start = time.perf_counter()
    once(tokens)
    rate = len(prompts) * tokens / (time.perf_counter() - start)
    report(system="transformers generate", dtype=dtype, tokens_per_s=round(rate))
    return rate


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--model", choices=sorted(SHAPES), default="30M")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rng = np.random.default_rng(0)
    prompts = [
        rng.integers(3, 8192, size=arguments.prompt).astype(np.int32) for _ in range(arguments.requests)
    ]
    model = ModelConfig(shape=shape(arguments.model))
    report(
        model=arguments.model, requests=arguments.requests, tokens=arguments.tokens, threads=arguments.threads
    )
    native = run_native(model, prompts, arguments.tokens, arguments.dtype)
    invariant = run_native(model, prompts, arguments.tokens, arguments.dtype, batch_invariant=True)
    modules = run_native(model, prompts, arguments.tokens, arguments.dtype, fast_path=False)
    peer = run_transformers(model, prompts, arguments.tokens, arguments.dtype)
    report(
        native_over_transformers=round(native / peer, 2), invariant_over_native=round(invariant / native, 3),
        modules_over_native=round(modules / native, 3),
    )  # fmt: skip


if __name__ == "__main__":
    main()
