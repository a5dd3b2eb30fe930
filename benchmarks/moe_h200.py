"""A mixture of experts of the shape of Qwen3-30B-A3B on one H200: decoding, a training step, and what replay costs.

    python benchmarks/moe_h200.py [--layers 48] [--trained-layers 6] [--small]

Random bf16 weights, made on the device. Decoding has all 48 layers (61 GB); training has so many layers that weights,
gradients and AdamW's state fit. The rival of our kernels for the experts is torch's grouped_mm. Bounds: at 256
sequences every expert is chosen by somebody, so a step reads all weights once at 4.27 TB/s; a training step
multiplies what its tokens are sent to (8 of 128 experts), 6 FLOPs a weight and token, at 771 TFLOP/s. Replay: the
same step with every token's experts given (R3). Prints JSON lines; --small runs anywhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import time
from typing import Any

import numpy as np
import torch
from report import report
from training_h200 import make_batch, make_trainer, median_s

from rill.inference.base import Request
from rill.inference.native.engine import NativeEngine
from rill.models.loading import ModelConfig, load_model_config
from rill.types import SamplingParams

BYTES_PER_S, FLOP_PER_S = 4.27e12, 771e12

SHAPE: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "vocab_size": 151936,
    "tie_word_embeddings": False, "max_position_embeddings": 8192,
}  # fmt: skip
SMALL: dict[str, Any] = SHAPE | {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
    "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 512,
}  # fmt: skip


def decoding(shape: dict[str, Any], device: str, count: int, new: int, *, by: str = "") -> None:
    from transformers import AutoModelForCausalLM

    config = ModelConfig(shape=shape, tokenizer=None)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(load_model_config(config), dtype=torch.bfloat16).eval()
    num_weights = sum(p.numel() for p in model.parameters())
    engine = NativeEngine(
        NativeEngine.Config(
            model=config, device=device, dtype="bfloat16", max_context=1024, kv_memory_fraction=0.6
        ),
        model=model,
        owns_model=True,
    )
    for size in (1, 16, count):
        prompts = np.random.default_rng(size).integers(0, shape["vocab_size"], (size, 128)).astype(np.int32)
        for name, length in (("warm", new // 4), ("run", new)):
            sampling = SamplingParams(max_new_tokens=length, ignore_eos=True)
            asked = [
                Request(id=f"{name}{size}-{i}", token_ids=p, sampling=sampling) for i, p in enumerate(prompts)
            ]
            began = time.perf_counter()
            engine.generate(asked, timeout_s=300)
            rate = size * length / (time.perf_counter() - began)
        bound = size * BYTES_PER_S / (2 * num_weights) if size == count else None
        report(
            what=f"decoding{by}, {size} x 128 + {new}", tokens_per_s=round(rate), weights=num_weights,
            bound=bound and round(bound), share=bound and round(rate / bound, 3),
        )  # fmt: skip
    engine.close()
    del engine, model
    gc.collect()


def training(shape: dict[str, Any], device: str, num_tokens: int) -> None:
    batch = make_batch(num_tokens, shape["vocab_size"], 1)
    num_layers, num_experts, chosen = (
        shape[key] for key in ("num_hidden_layers", "num_experts", "num_experts_per_tok")
    )
    rng = np.random.default_rng(0)
    given = [
        dataclasses.replace(
            s,
            trajectory=dataclasses.replace(
                s.trajectory,
                routed_experts=rng.integers(0, num_experts, (s.num_tokens, num_layers, chosen)).astype(
                    np.int16
                ),
            ),
        )
        for s in batch
    ]
    rates: dict[str, float] = {}
    trainer = make_trainer(
        device, shape, micro_batch_tokens=num_tokens, routing_replay=True, activation_checkpointing="full"
    )
    experts = sum(p.numel() for n, p in trainer.engine.module.named_parameters() if ".experts." in n)
    others = sum(p.numel() for n, p in trainer.engine.module.named_parameters() if ".experts." not in n)
    active = others - shape["vocab_size"] * shape["hidden_size"] + experts * chosen / num_experts
    for name, samples in (("router", batch), ("replay", given)):
        trainer.update(samples)
        rates[name] = num_tokens / median_s(lambda _, samples=samples: trainer.update(samples), 3)
    bound = FLOP_PER_S / (6 * active)
    report(
        what=f"training, {num_layers} layers, {num_tokens} packed tokens", weights=experts + others,
        active=round(active), tokens_per_s=round(rates["router"]), bound=round(bound),
        share=round(rates["router"] / bound, 3), with_replay=round(rates["replay"]),
        replay_costs=round(1 - rates["replay"] / rates["router"], 4),
        peak_gb=round(torch.cuda.max_memory_allocated() / 1e9, 1) if device == "cuda" else None,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--trained-layers", type=int, default=6)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only-decoding", action="store_true")
    args = parser.parse_args()
    if args.small:
        decoding(SMALL | {"num_hidden_layers": 2}, "cpu", 8, 16)
        training(SMALL | {"num_hidden_layers": 2}, "cpu", 512)
        return
    if not torch.cuda.is_available():
        report(skipped="needs a CUDA device; --small runs anywhere")
        return
    from rill.models.ops import triton_experts

    decoding(SHAPE | {"num_hidden_layers": args.layers}, "cuda", 256, 128)
    torch.cuda.empty_cache()
    triton_experts.MAX_CHOICES = 0
    decoding(SHAPE | {"num_hidden_layers": args.layers}, "cuda", 256, 128, by=" by grouped_mm")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if args.only_decoding:
        return
    training(SHAPE | {"num_hidden_layers": args.trained_layers}, "cuda", 16_384)


if __name__ == "__main__":
    main()
