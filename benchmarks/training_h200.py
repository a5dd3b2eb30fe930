"""The trainer on one H200: is the GPU route right, how fast is a step, what does it hold, where does the time go.

    python benchmarks/training_h200.py [--only correct,optimizer,step,profile,padded,recompute,offload] [--small]

Prints one JSON line per result. The model has the shape of Qwen2.5-1.5B with random weights, float32 masters and bf16
compute; a step is 16,384 tokens of log-normal answer lengths with GRPO's loss. FLOPs are 6 × parameters per token plus
causal attention (6 × layers × width × length per token), divided by 990 TFLOP/s. `--small` is a smoke test anywhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rill.algorithms import Algorithm, AlgorithmConfig
from rill.models.loading import ModelConfig, load_model_config
from rill.training.engine import EngineConfig
from rill.training.module import PackedModule, PolicyModule
from rill.training.policy import PolicyTrainer
from rill.types import Sample, Trajectory

SHAPE: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 1024, "tie_word_embeddings": True,
}  # fmt: skip
PEAK_FLOP_PER_S = 990e12


def report(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


class QuickTrainer(PolicyTrainer):
    """Weights drawn on the device: the real loading draws on the host, which takes longer than the benchmark."""

    def _make_module(self, config: EngineConfig, device: torch.device) -> PackedModule:
        if device.type != "cuda":
            return super()._make_module(config, device)
        from transformers import AutoModelForCausalLM

        from rill.models import attention_packed

        attention_packed.register()
        with torch.device(device):
            torch.manual_seed(0)
            lm = AutoModelForCausalLM.from_config(
                load_model_config(config.model), dtype=torch.float32, attn_implementation="rill_packed"
            )
        return PolicyModule(lm.eval(), chunk_bytes=config.head_chunk_bytes, keep_bytes=config.head_keep_bytes)


def make_batch(num_tokens: int, vocab: int, seed: int, *, group: int = 4, mean: float = 6.3) -> list[Sample]:
    """Groups with a prompt of 64 to 256 tokens and log-normal answers, filled up to exactly num_tokens."""
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    left, prompt = num_tokens, np.zeros(0, dtype=np.int32)
    while left > 0:
        if len(samples) % group == 0:
            prompt = rng.integers(0, vocab, rng.integers(64, 257)).astype(np.int32)
        length = len(prompt) + int(np.clip(rng.lognormal(mean, 0.9), 16, 4096))
        length = left if left - length < 300 else length
        answer = rng.integers(0, vocab, max(2, length - len(prompt))).astype(np.int32)
        tokens = np.concatenate([prompt, answer])[-length:]
        sampled = np.arange(length) >= length - len(answer[-(length - 1) :])
        samples.append(
            Sample(
                trajectory=Trajectory(
                    id=f"{seed}-{len(samples)}",
                    group_id=f"{seed}-{len(samples) // group}",
                    prompt_id="p",
                    token_ids=tokens,
                    logprobs=np.where(sampled, -12.0, 0.0).astype(np.float32),
                    versions=np.where(sampled, 0, -1).astype(np.int32),
                    loss_mask=sampled,
                    turn_ids=sampled.astype(np.int32),
                ),
                advantages=np.where(sampled, rng.normal(), 0.0).astype(np.float32),
            )
        )
        left -= length
    return samples


def padded(samples: list[Sample]) -> list[Sample]:
    """The same batch as rows of equal length: what a trainer without packing computes."""
    longest = max(s.num_tokens for s in samples)
    out = []
    for s in samples:
        extra = longest - s.num_tokens
        t = s.trajectory
        out.append(
            dataclasses.replace(
                s,
                advantages=np.pad(s.advantages, (0, extra)),
                trajectory=dataclasses.replace(
                    t,
                    **{
                        name: np.pad(getattr(t, name), (0, extra))
                        for name in ("token_ids", "logprobs", "versions", "loss_mask", "turn_ids")
                    },
                ),
            )
        )
    return out


def algorithm() -> Algorithm:
    return Algorithm(AlgorithmConfig.model_validate({"type": "grpo", "check_finite": False}))


def make_trainer(device: str, shape: dict[str, Any], **values: Any) -> QuickTrainer:
    settings = {
        "compute_dtype": "bfloat16",
        "head_chunk_bytes": 5 * 2**29,
        # One pass of the whole step within 60 GB: the cheapest activations are computed again.
        "activation_memory_budget": 0.8,
        **values,
    }
    return QuickTrainer(
        QuickTrainer.Config(model=ModelConfig(shape=shape), **settings), algorithm(), device=device
    )


def flops_of(shape: dict[str, Any], samples: list[Sample], num_parameters: int) -> float:
    tokens = sum(s.num_tokens for s in samples)
    attention = 6.0 * shape["num_hidden_layers"] * shape["hidden_size"]
    return 6.0 * num_parameters * tokens + attention * sum(s.num_tokens**2 for s in samples)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_s(call: Any, repeats: int) -> float:
    times = []
    for index in range(repeats):
        synchronize()
        start = time.perf_counter()
        call(index)
        synchronize()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def check_correct(device: str) -> None:
    """bf16 on the variable-length kernel, plain, tree-packed and recomputed, against float32 through SDPA."""
    samples = make_batch(3000, SMALL["vocab_size"], 1, mean=4.5)
    wide = {**SMALL, "initializer_range": 0.05}

    def gradient(**values: Any) -> tuple[dict[str, torch.Tensor], list[Any]]:
        settings = {"micro_batch_tokens": 2048, "head_chunk_bytes": 2**20, **values}
        lm_trainer = PolicyTrainer(
            PolicyTrainer.Config(model=ModelConfig(shape=wide), **settings), algorithm(), device=device
        )
        lm_trainer.accumulate(samples)
        return lm_trainer.engine.gradients(), lm_trainer.logprobs(samples)

    reference, logprobs = gradient(compute_dtype="float32")
    for name, values in {
        "packed": {},
        "tree": {"tree_packing": True},
        "tree_float32": {"tree_packing": True, "compute_dtype": "float32"},
        "checkpointing": {"activation_checkpointing": "full"},
        "compiled": {"compile": True},
        "compiled_selective": {"compile": True, "activation_checkpointing": "selective"},
    }.items():
        found, lp = gradient(**{"compute_dtype": "bfloat16", **values})
        norm = torch.stack([g.norm() for g in reference.values()]).norm()
        error = torch.stack([(found[n] - g).norm() for n, g in reference.items()]).norm() / norm
        diff = max(float(np.abs(a - b).max()) for a, b in zip(lp, logprobs, strict=True))
        report(name=f"correct/{name}", gradient_error=float(error), max_logprob_diff=diff)


def check_optimizer(device: str) -> None:
    """The one-pass AdamW against torch's fused one, over three steps of one and of several passes each."""
    samples = make_batch(3000, SMALL["vocab_size"], 1, mean=4.5)

    def weights(micro: int, **optimizer: Any) -> tuple[dict[str, torch.Tensor], bool]:
        settings = {"compute_dtype": "bfloat16", "micro_batch_tokens": micro, "head_chunk_bytes": 2**20}
        config = PolicyTrainer.Config(
            model=ModelConfig(shape=SMALL), optimizer={"learning_rate": 1e-3, **optimizer}, **settings
        )
        trainer = PolicyTrainer(config, algorithm(), device=device)
        for _ in range(3):
            trainer.update(samples)
        agrees = all(torch.equal(s.template, s.master.to(s.template.dtype)) for s in trainer.engine.slots)
        return {s.name: s.master for s in trainer.engine.slots}, agrees

    for micro in (4096, 1600):
        (found, agrees), (wanted, _) = weights(micro, one_pass=True), weights(micro)
        total = sum(w.numel() for w in wanted.values())
        near = sum(int(((found[n] - w).abs() < 1e-4).sum()) for n, w in wanted.items())
        report(name="correct/optimizer", micro=micro, copies_agree=agrees, near_share=near / total)


def time_steps(
    trainer: QuickTrainer, shape: dict[str, Any], batches: list[list[Sample]], repeats: int
) -> float:
    num_parameters = sum(s.master.numel() for s in trainer.engine.slots)
    start = time.perf_counter()
    for batch in batches[:2]:
        trainer.update(batch)
    synchronize()
    report(name="step/warmup", seconds=time.perf_counter() - start)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seconds = median_s(lambda i: trainer.update(batches[i % len(batches)]), repeats)
    tokens = np.mean([sum(s.num_tokens for s in b) for b in batches])
    flops = np.mean([flops_of(shape, b, num_parameters) for b in batches])
    report(
        name="step/packed",
        tokens=float(tokens),
        trained_share=float(np.mean([s.trajectory.loss_mask.mean() for b in batches for s in b])),
        mean_length=float(np.mean([s.num_tokens for b in batches for s in b])),
        micro_batch_tokens=trainer.config.micro_batch_tokens,
        checkpointing=trainer.config.activation_checkpointing,
        one_pass_optimizer=trainer.config.optimizer.one_pass,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        mfu=flops / seconds / PEAK_FLOP_PER_S,
        peak_gb=torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None,
    )
    return float(tokens / seconds)


def profile_step(trainer: QuickTrainer, batch: list[Sample]) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
        trainer.update(batch)
        synchronize()
    table = prof.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90)
    out = os.environ.get("OUT")
    if out:
        Path(out, "profile.txt").write_text(table)
    rows = sorted(prof.key_averages(), key=lambda e: -e.self_device_time_total)[:22]
    for row in rows:
        report(name="profile", kernel=row.key[:100], ms=row.self_device_time_total / 1e3, count=row.count)


def run(
    only: set[str],
    micro: int,
    checkpointing: str,
    is_small: bool,
    repeats: int,
    batch_tokens: int,
    one_pass: bool,
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "correct" in only:
        check_correct(device)
    if "optimizer" in only and device == "cuda":
        check_optimizer(device)
    shape = SMALL if is_small else SHAPE
    if not only - {"correct", "optimizer"}:
        return
    trainer = make_trainer(
        device,
        shape,
        micro_batch_tokens=micro,
        activation_checkpointing=checkpointing,
        compile=device == "cuda",
        optimizer={"one_pass": one_pass},
    )
    batches = [make_batch(batch_tokens, shape["vocab_size"], seed) for seed in range(4)]
    train_rate = time_steps(trainer, shape, batches, repeats)
    if "profile" in only and device == "cuda":
        profile_step(trainer, batches[0])
    if "recompute" in only:
        trainer.logprobs(batches[0], trained_only=True)
        seconds = median_s(lambda i: trainer.logprobs(batches[i % 4], trained_only=True), repeats)
        rate = batch_tokens / seconds
        report(name="recompute", tokens_per_s=rate, times_training=rate / train_rate)
    if "padded" in only:
        rows = padded(batches[0])
        trainer.update(rows)
        seconds = median_s(lambda i: trainer.update(rows), max(2, repeats // 2))
        report(
            name="step/padded",
            padded_tokens=sum(s.num_tokens for s in rows),
            seconds=seconds,
            packed_speedup=seconds * train_rate / batch_tokens,
        )
    if "offload" in only and device == "cuda":
        check_offload(trainer, batches[0])


def check_offload(trainer: QuickTrainer, batch: list[Sample]) -> None:
    before = trainer.logprobs(batch[:2])
    held = torch.cuda.memory_allocated()
    start = time.perf_counter()
    trainer.offload()
    middle = time.perf_counter()
    left = torch.cuda.memory_allocated()
    trainer.onload()
    end = time.perf_counter()
    again = trainer.logprobs(batch[:2])
    report(
        name="offload",
        offload_s=middle - start,
        onload_s=end - middle,
        held_gb=held / 1e9,
        left_gb=left / 1e9,
        is_same=all(np.array_equal(a, b) for a, b in zip(before, again, strict=True)),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="correct,optimizer,step,profile,recompute,padded,offload")
    parser.add_argument("--micro", type=int, default=16384)
    parser.add_argument("--checkpointing", default="none")
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--one-pass", action="store_true", help="the one-pass AdamW")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    if not (args.small or torch.cuda.is_available()):
        print(json.dumps({"skipped": "needs a CUDA device; --small runs anywhere"}))
        return
    run(
        set(args.only.split(",")),
        args.micro,
        args.checkpointing,
        args.small,
        args.repeats,
        args.batch_tokens,
        args.one_pass,
    )


if __name__ == "__main__":
    main()
