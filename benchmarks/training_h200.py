"""The trainer on one H200: is the GPU route right, how fast is a step, what does it hold, where does the time go.

    python benchmarks/training_h200.py [--only correct,optimizer,step,profile,padded,recompute,offload] [--small]

Prints one JSON line per result. The model has the shape of Qwen2.5-1.5B with random weights, float32 masters and bf16
compute; a step is 16,384 tokens of log-normal answer lengths with GRPO's loss. FLOPs are 6 × parameters per token plus
causal attention (6 × layers × width × length per token), divided by 990 TFLOP/s. `--small` is a smoke test anywhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import report
from shapes import QWEN_1_5B

from rill.algorithms import Algorithm, AlgorithmConfig
from rill.models.loading import ModelConfig, load_model_config
from rill.training.engine_config import EngineConfig
from rill.training.module import PackedModule, PolicyModule
from rill.training.policy import PolicyTrainer
from rill.types import Sample, Trajectory

SMALL: dict[str, Any] = QWEN_1_5B | {
    "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512, "vocab_size": 1024,
}  # fmt: skip
PEAK_FLOP_PER_S = 990e12


class QuickTrainer(PolicyTrainer):
    """Weights drawn on the device: the real loading draws on the host, which takes longer than the benchmark."""

    def _make_module(self, config: EngineConfig, device: torch.device) -> PackedModule:
        if device.type != "cuda":
            return super()._make_module(config, device)
        from transformers import AutoModelForCausalLM

        from rill.models.train import attention_packed

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
        padding = {
            name: np.pad(getattr(t, name), (0, extra))
            for name in ("token_ids", "logprobs", "versions", "loss_mask", "turn_ids")
        }
        out.append(
            dataclasses.replace(
                s,
                advantages=np.pad(s.advantages, (0, extra)),
                trajectory=dataclasses.replace(t, **dict[str, Any](padding)),
            )
        )
    return out


def algorithm() -> Algorithm:
    return Algorithm(AlgorithmConfig.model_validate({"type": "grpo", "check_finite": False}))


def make_trainer(device: str, shape: dict[str, Any], **values: Any) -> QuickTrainer:
    settings = {
        "compute_dtype": "bfloat16",
        "head_keep_bytes": 5 * 2**30,
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
        lm_trainer.begin()
        lm_trainer.accumulate(samples)
        return lm_trainer.engine.gradients(), lm_trainer.logprobs(samples)

    reference, logprobs = gradient(compute_dtype="float32")
    variants: dict[str, dict[str, Any]] = {
        "packed": {},
        "tree": {"tree_packing": True},
        "tree_float32": {"tree_packing": True, "compute_dtype": "float32"},
        "checkpointing": {"activation_checkpointing": "full"},
        "compiled": {"compile": True},
        "compiled_selective": {"compile": True, "activation_checkpointing": "selective"},
    }
    for name, values in variants.items():
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
        (found, agrees), (wanted, _) = weights(micro), weights(micro, one_pass=False)
        total = sum(w.numel() for w in wanted.values())
        near = sum(int(((found[n] - w).abs() < 1e-4).sum()) for n, w in wanted.items())
        report(name="correct/optimizer", micro=micro, copies_agree=agrees, near_share=near / total)


def time_steps(
    trainer: QuickTrainer, shape: dict[str, Any], batches: list[list[Sample]], repeats: int
) -> float:
    num_parameters = sum(s.master.numel() for s in trainer.engine.slots)
    start = time.perf_counter()
    for batch in batches:
        trainer.update(batch)
    synchronize()
    report(name="step/warmup", seconds=time.perf_counter() - start)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    # Steps follow one another without a wait in between, as in training.
    start = time.perf_counter()
    for index in range(repeats):
        trainer.update(batches[index % len(batches)])
    synchronize()
    seconds = (time.perf_counter() - start) / repeats
    tokens = np.mean([sum(s.num_tokens for s in b) for b in batches])
    flops = np.mean([flops_of(shape, b, num_parameters) for b in batches])
    report(
        name="step/packed",
        tokens=float(tokens),
        trained_share=float(np.mean([s.trajectory.loss_mask.mean() for b in batches for s in b])),
        mean_length=float(np.mean([s.num_tokens for b in batches for s in b])),
        micro_batch_tokens=trainer.config.micro_batch_tokens,
        checkpointing=trainer.config.activation_checkpointing,
        fp8=trainer.config.fp8,
        activation_memory_budget=trainer.config.activation_memory_budget,
        optimizer=trainer.config.optimizer.type,
        offload_state=trainer.config.optimizer.offload_state,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        mfu=flops / seconds / PEAK_FLOP_PER_S,
        peak_gb=torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None,
    )
    return float(tokens / seconds)


PROFILED_STEPS = 3
_KINDS = {
    "attention": ("_forward", "_backward_keys", "_backward_queries", "flash"),
    "matrix products": ("nvjet", "gemm", "cutlass", "splitK"),
    "optimizer and norm": ("_adamw_kernel", "_adamw8_kernel", "_squares_kernel", "multi_tensor_apply"),
    "head's softmax": ("_stats", "_gradient"),
    "layers' element-wise work": ("triton_",),
}


def profile_step(trainer: QuickTrainer, shape: dict[str, Any], batch: list[Sample]) -> None:
    """Device time of a step by kind of kernel beside the least it could take, and what no kernel covers. Steps follow
    one another as in training, so that what the host does during the optimizer's kernel is not counted as idle."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        start = time.perf_counter()
        for _ in range(PROFILED_STEPS):
            trainer.update(batch)
        synchronize()
        wall_ms = 1e3 * (time.perf_counter() - start) / PROFILED_STEPS
    kernels = [e for e in prof.events() if e.device_type == torch._C._autograd.DeviceType.CUDA]
    totals: dict[str, tuple[float, int]] = {}
    names: dict[str, tuple[float, int]] = {}
    others: dict[str, tuple[float, int]] = {}
    for event in kernels:
        words = ((kind, w) for kind, ws in _KINDS.items() for w in ws)
        kind = next((kind for kind, word in words if word in event.name), "other")
        tables = [(totals, kind), (names, event.name), *([(others, event.name)] if kind == "other" else [])]
        for table, key in tables:
            ms, count = table.get(key, (0.0, 0))
            table[key] = ms + event.device_time_total / 1e3 / PROFILED_STEPS, count + 1
    floors = floors_ms(trainer, shape, batch)
    for kind, (ms, count) in sorted(totals.items(), key=lambda item: -item[1][0]):
        report(
            name="profile",
            kind=kind,
            ms=round(ms, 2),
            kernels=count // PROFILED_STEPS,
            floor_ms=floors.get(kind),
        )
    for name, (ms, count) in sorted(others.items(), key=lambda item: -item[1][0])[:16]:
        per_step = {"ms": round(ms, 3), "kernels": round(count / PROFILED_STEPS, 1)}
        report(name="profile/other", **per_step, kernel=name.replace("void at::native::", "")[:110])
    covered, gaps = coverage(kernels)
    idle_ms = wall_ms - covered / PROFILED_STEPS
    # The rest of it lies before the first step's first kernel, where the host has no step before to hide behind.
    between_ms = sum(ms for ms, _, _ in gaps) / PROFILED_STEPS
    report(
        name="profile",
        kind="no kernel",
        ms=round(idle_ms, 2),
        between_kernels_ms=round(between_ms, 2),
        kernels=len(kernels) // PROFILED_STEPS,
        wall_ms=round(wall_ms, 1),
    )
    for ms, before, after in gaps[:10]:
        report(name="profile/gap", ms=round(ms, 3), after=before[:60], before=after[:60])
    for low, high in ((0.0, 0.005), (0.005, 0.02), (0.02, 0.1), (0.1, 10.0)):
        inside = [g[0] for g in gaps if low <= g[0] < high]
        ms, count = sum(inside) / PROFILED_STEPS, len(inside) // PROFILED_STEPS
        report(name="profile/gaps", from_ms=low, to_ms=high, ms=round(ms, 2), count=count)
    out = os.environ.get("OUT")
    if out:
        rows = sorted(names.items(), key=lambda item: -item[1][0])[:60]
        Path(out, "kernels.txt").write_text("\n".join(f"{ms:9.3f} {count:6d} {n}" for n, (ms, count) in rows))


def coverage(kernels: list[Any]) -> tuple[float, list[tuple[float, str, str]]]:
    """(milliseconds with a kernel running, the gaps with the kernels around them, longest first)."""
    ordered = sorted(kernels, key=lambda e: e.time_range.start)
    total = ordered[0].time_range.elapsed_us()
    end, name = ordered[0].time_range.end, ordered[0].name
    gaps: list[tuple[float, str, str]] = []
    for event in ordered[1:]:
        start, stop = event.time_range.start, event.time_range.end
        if start > end:
            gaps.append(((start - end) / 1e3, name, event.name))
        total += max(0.0, stop - max(start, end))
        if stop > end:
            end, name = stop, event.name
    return total / 1e3, sorted(gaps, reverse=True)


def floors_ms(trainer: QuickTrainer, shape: dict[str, Any], batch: list[Sample]) -> dict[str, float]:
    """What the arithmetic at 771 TFLOP/s and the bytes at 4.27 TB/s (both measured) would take at least."""
    tokens = sum(s.num_tokens for s in batch)
    trained = sum(int(s.trajectory.loss_mask.sum()) for s in batch)
    parameters = sum(s.master.numel() for s in trainer.engine.slots)
    head = shape["vocab_size"] * shape["hidden_size"]
    products = 6.0 * ((parameters - head) * tokens + head * trained)
    attention = flops_of(shape, batch, 0) * 7 / 6  # the backward pass computes the scores again
    # Elements a token and layer: each fused kernel reads its inputs and writes its outputs once.
    layer = 9 * shape["intermediate_size"] + 28 * shape["hidden_size"]
    moved = {
        "optimizer and norm": 30.0 * parameters,
        "head's softmax": 6.0 * trained * shape["vocab_size"],
        "layers' element-wise work": 2.0 * layer * tokens * shape["num_hidden_layers"],
    }
    floors = {"matrix products": products / 771e9, "attention": attention / 771e9}
    floors.update({kind: count / 4.27e9 for kind, count in moved.items()})
    return {kind: round(ms, 2) for kind, ms in floors.items()}


def run(
    only: set[str],
    micro: int,
    checkpointing: str,
    is_small: bool,
    repeats: int,
    batch_tokens: int,
    budget: float,
    optimizer: dict[str, Any],
    fp8: bool,
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "correct" in only:
        check_correct(device)
    if "optimizer" in only and device == "cuda":
        check_optimizer(device)
    shape = SMALL if is_small else QWEN_1_5B
    batches = [make_batch(batch_tokens, shape["vocab_size"], seed) for seed in range(4)]
    if not only - {"correct", "optimizer"}:
        return
    trainer = make_trainer(
        device,
        shape,
        micro_batch_tokens=micro,
        activation_checkpointing=checkpointing,
        # Below 1 the cheapest activations are computed again: the whole step in one pass within 60 GB.
        activation_memory_budget=budget if device == "cuda" else 1.0,
        compile=device == "cuda",
        optimizer=optimizer,
        fp8=fp8,
    )
    train_rate = time_steps(trainer, shape, batches, repeats)
    if "profile" in only and device == "cuda":
        profile_step(trainer, shape, batches[0])
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


def report_transfer_rates() -> None:
    host, device = (
        torch.empty(2**32, dtype=torch.uint8, **kw) for kw in ({"pin_memory": True}, {"device": "cuda"})
    )
    seconds = [
        median_s(lambda i, a=a, b=b: a.copy_(b, non_blocking=True), 3)
        for a, b in ((host, device), (device, host))
    ]
    rates = [2**32 / 1e9 / s for s in seconds]
    report(name="offload/limit", to_host_gb_per_s=rates[0], to_device_gb_per_s=rates[1])


def check_offload(trainer: QuickTrainer, batch: list[Sample]) -> None:
    """Three turns: the first also makes the pinned memory. The limit is one plain transfer of 4 GB each way."""
    report_transfer_rates()
    before = trainer.logprobs(batch[:2])
    for turn in range(3):
        synchronize()
        held = torch.cuda.memory_allocated()
        start = time.perf_counter()
        trainer.offload()
        middle = time.perf_counter()
        left = torch.cuda.memory_allocated()
        moved = trainer.engine.shelf.num_bytes / 1e9
        begin = time.perf_counter()
        trainer.onload()
        synchronize()
        end = time.perf_counter()
        report(
            name="offload",
            turn=turn,
            offload_s=middle - start,
            onload_s=end - begin,
            moved_gb=moved,
            held_gb=held / 1e9,
            left_gb=left / 1e9,
            gb_per_s=2 * moved / (middle - start + end - begin),
        )
    again = trainer.logprobs(batch[:2])
    report(name="offload/same", is_same=all(np.array_equal(a, b) for a, b in zip(before, again, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="correct,optimizer,step,profile,recompute,padded,offload")
    parser.add_argument("--micro", type=int, default=16384)
    parser.add_argument("--checkpointing", default="none")
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--budget", type=float, default=1.0, help="activation_memory_budget")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--offload-state", action="store_true")
    parser.add_argument("--fp8", action="store_true", help="the layers' products in 8 bits")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    if not (args.small or torch.cuda.is_available()):
        report(skipped="needs a CUDA device; --small runs anywhere")
        return
    run(
        set(args.only.split(",")),
        args.micro,
        args.checkpointing,
        args.small,
        args.repeats,
        args.batch_tokens,
        args.budget,
        {"type": args.optimizer, "offload_state": args.offload_state},
        args.fp8,
    )


if __name__ == "__main__":
    main()
