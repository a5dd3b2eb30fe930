"""The native engine on the CPU beside transformers' generate and vLLM's CPU build.

    python benchmarks/inference_cpu.py [--model 30M] [--dtype bfloat16] [--threads N] [--vllm-python VENV/bin/python]

Prints one JSON line per system: tokens per second for `requests` sampled completions of `tokens` tokens, best of
--rounds, the same per second of processor time (which tells more on a busy machine), and the time to the first token
of a single request. All systems run as processes of their own, in turns, so that a busy moment of the machine hits
each, from one folder with a fresh Llama shape, the same prompts, the same precision and the same number of threads. At
the end the ratios, and how near the native engine comes to a step that is nothing but its matrix products (torch's, at
the batch's size).

--options runs the native engine with batch_invariant, with the modules' own forward methods and with drafts
(num_speculative_tokens) as well. Text that repeats itself, where drafts pay: --options --requests 1 --temperature 0.3
(a random tied model repeats its last token at low temperatures); try 1 to 16 requests, and 1.0 for text that does not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from report import report

SHAPES: dict[str, dict[str, Any]] = {
    "5M": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4},
    "10M": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 4},
    "30M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8},
    "60M": {
        "hidden_size": 640,
        "intermediate_size": 1920,
        "num_hidden_layers": 10,
        "num_attention_heads": 10,
    },
}
VOCAB = 8192
TIMEOUT_S = 900


def shape(name: str) -> dict[str, Any]:
    return SHAPES[name] | {
        "model_type": "llama",
        "num_key_value_heads": SHAPES[name]["num_attention_heads"] // 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }


def make_prompts(args: argparse.Namespace) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return rng.integers(3, VOCAB, size=(args.requests, args.prompt)).tolist()


def measure(
    args: argparse.Namespace, system: str, run: Callable[[list[list[int]], int], int], **extra: Any
) -> None:
    """`run` completes prompts by so many tokens each and returns how many tokens it made."""
    prompts = make_prompts(args)
    run(prompts, 8)
    rates, cpu_rates, first = [], [], []
    for _ in range(args.rounds):
        began, cpu_began = time.perf_counter(), time.process_time()
        count = run(prompts, args.tokens)
        cpu_rates.append(count / (time.process_time() - cpu_began))
        rates.append(count / (time.perf_counter() - began))
    for _ in range(5):
        began = time.perf_counter()
        run(prompts[:1], 1)
        first.append(time.perf_counter() - began)
    report(
        system=system, tokens_per_s=round(max(rates)), tokens_per_cpu_s=round(max(cpu_rates)),
        first_token_ms=round(1000 * statistics.median(first), 1), **extra,
    )  # fmt: skip


# --- the systems --------------------------------------------------------------------------------------------


def run_native(args: argparse.Namespace, **options: Any) -> None:
    import torch

    from rill.inference.base import Request
    from rill.inference.native.engine import NativeEngine
    from rill.models.loading import ModelConfig
    from rill.types import SamplingParams

    torch.set_num_threads(args.threads)
    model = ModelConfig(path=args.folder, tokenizer="chars")
    engine = NativeEngine(
        NativeEngine.Config(
            model=model, dtype=args.dtype, device="cpu", max_num_seqs=max(16, args.requests), num_kv_blocks=2048,
            **options,
        )
    )  # fmt: skip
    calls = 0

    def run(prompts: list[list[int]], tokens: int) -> int:
        nonlocal calls
        calls += 1
        engine.flush()  # nothing is served from the round before
        requests = [
            Request(
                id=f"{calls}-{i}",
                token_ids=np.array(prompt, dtype=np.int32),
                sampling=SamplingParams(
                    max_new_tokens=tokens, ignore_eos=True, seed=i, temperature=args.temperature
                ),
            )
            for i, prompt in enumerate(prompts)
        ]
        return sum(len(c.token_ids) for c in engine.generate(requests))

    measure(args, "rill", run, options=options)
    engine.close()


def run_transformers(args: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    module = AutoModelForCausalLM.from_pretrained(args.folder, dtype=getattr(torch, args.dtype))

    def run(prompts: list[list[int]], tokens: int) -> int:
        ids = torch.tensor(prompts)
        module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=args.temperature > 0,
            temperature=args.temperature or None,
            pad_token_id=0,
        )
        return len(prompts) * tokens

    measure(args, "transformers", run)


def run_vllm(args: argparse.Namespace) -> None:
    """In an environment that has vLLM's CPU build and not rill."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    engine = LLM(
        args.folder, dtype=args.dtype, skip_tokenizer_init=True, max_num_seqs=args.requests, max_model_len=1024,
        enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip

    def run(prompts: list[list[int]], tokens: int) -> int:
        params = [
            SamplingParams(
                max_tokens=tokens,
                ignore_eos=True,
                seed=i,
                detokenize=False,
                logprobs=0,
                temperature=args.temperature,
            )
            for i in range(len(prompts))
        ]
        done = engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in done)

    measure(args, "vllm", run)


# --- the comparison -----------------------------------------------------------------------------------------


def products_s(args: argparse.Namespace) -> float:
    """Seconds that one decode step's matrix products take by themselves, through torch's linear."""
    import torch

    torch.set_num_threads(args.threads)
    values = shape(args.model)
    width, inner, layers = values["hidden_size"], values["intermediate_size"], values["num_hidden_layers"]
    sizes = [(width, 2 * width), (width, width), (width, 2 * inner), (inner, width)] * layers + [
        (width, VOCAB)
    ]
    dtype = getattr(torch, args.dtype)
    pairs = [(torch.randn(args.requests, k).to(dtype), torch.randn(n, k).to(dtype)) for k, n in sizes]
    best = float("inf")
    with torch.inference_mode():
        for _ in range(20):
            began = time.perf_counter()
            for x, weight in pairs:
                torch.nn.functional.linear(x, weight)
            best = min(best, time.perf_counter() - began)
    return best


def in_process(role: str, python: str, args: argparse.Namespace, folder: str) -> dict[str, Any]:
    command = [python, str(Path(__file__).resolve()), "--role", role, "--folder", folder]
    for name in ("requests", "tokens", "prompt", "rounds", "dtype", "threads", "temperature"):
        command += [f"--{name}", str(getattr(args, name))]
    env = {
        **os.environ, "OMP_NUM_THREADS": str(args.threads), "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    if role == "vllm":
        env.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"system"')
    ]
    if done.returncode or not lines:
        sys.stderr.write(done.stdout[-2000:] + done.stderr[-6000:])
        raise SystemExit(f"{role} ended with {done.returncode}")
    report(**lines[-1])
    return lines[-1]


def compare(args: argparse.Namespace) -> None:
    import torch

    from rill.models.loading import ModelConfig, load_model

    report(
        model=args.model, requests=args.requests, prompt=args.prompt, tokens=args.tokens, threads=args.threads,
        dtype=args.dtype,
    )  # fmt: skip
    roles = ["rill", "transformers"]
    if args.options:
        roles += ["rill-invariant", "rill-modules", "rill-drafts"]
    pythons = dict.fromkeys(roles, sys.executable)
    if args.vllm_python:
        pythons["vllm"] = args.vllm_python
    found: dict[str, list[dict[str, Any]]] = {role: [] for role in pythons}
    with tempfile.TemporaryDirectory(prefix="inference-cpu-") as folder:
        load_model(
            ModelConfig(shape=shape(args.model)), dtype=torch.float32, attention="sdpa"
        ).save_pretrained(folder)
        for number in range(args.turns):
            for role in list(pythons) if number % 2 == 0 else list(pythons)[::-1]:
                found[role].append(in_process(role, pythons[role], args, folder))
    for figure in ("tokens_per_s", "tokens_per_cpu_s"):
        best = {role: max(line[figure] for line in lines) for role, lines in found.items()}
        ratios = {f"rill_over_{role}": round(best["rill"] / best[role], 2) for role in best if role != "rill"}
        report(result=figure, **ratios)
    best_rate = max(line["tokens_per_s"] for line in found["rill"])
    bound = args.requests / products_s(args)
    report(result="rill's share of what the products alone would allow", share=round(best_rate / bound, 2))


ROLES: dict[str, Callable[[argparse.Namespace], None]] = {
    "rill": run_native,
    "rill-invariant": lambda args: run_native(args, batch_invariant=True),
    "rill-modules": lambda args: run_native(args, fast_path=False),
    "rill-drafts": lambda args: run_native(args, num_speculative_tokens=7),
    "transformers": run_transformers,
    "vllm": run_vllm,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--model", choices=sorted(SHAPES), default="30M")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3, help="measurements in each process")
    parser.add_argument("--turns", type=int, default=2, help="processes of each system")
    parser.add_argument("--options", action="store_true", help="also batch_invariant, modules, drafts")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--vllm-python", help="a Python that has vLLM's CPU build")
    parser.add_argument("--role", choices=sorted(ROLES))
    parser.add_argument("--folder", help="the model, for a role")
    args = parser.parse_args()
    if args.role:
        ROLES[args.role](args)
    else:
        compare(args)


if __name__ == "__main__":
    main()
