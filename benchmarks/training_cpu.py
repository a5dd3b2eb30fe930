"""A GRPO update on the CPU: rill's trainer against TRL's GRPOTrainer loss step, same model, batch and loss, in one run.

    python benchmarks/training_cpu.py [--repeats 5] [--threads 2] [--dtypes float32,bfloat16]

Prints one JSON line per result. A 5-million-parameter Qwen2 (256 wide, 4 layers, vocabulary 4,096), 64 completions of
64 tokens after prompts of 16. Counted: tokens of prompts and completions per second of one optimizer step. TRL runs
as its users run it (padded batch, `_compute_loss` of GRPOTrainer, AdamW, clipping); without `trl` installed that
line is left out and a plain transformers loop with the same padded batch, loss and optimizer stands in.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from rill.algorithms import Algorithm, AlgorithmConfig
from rill.models.loading import ModelConfig, load_model
from rill.training.policy import PolicyTrainer
from rill.types import Sample, Trajectory

SHAPE: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
NUM_COMPLETIONS, PROMPT, COMPLETION = 64, 16, 64


def report(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def make_samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    samples = []
    for index in range(NUM_COMPLETIONS):
        if index % 8 == 0:
            prompt = rng.integers(0, SHAPE["vocab_size"], PROMPT).astype(np.int32)
        answer = rng.integers(0, SHAPE["vocab_size"], COMPLETION).astype(np.int32)
        mask = np.arange(PROMPT + COMPLETION) >= PROMPT
        trajectory = Trajectory(
            id=str(index),
            group_id=str(index // 8),
            prompt_id="p",
            token_ids=np.concatenate([prompt, answer]),
            logprobs=np.where(mask, -8.3, 0.0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            loss_mask=mask,
            turn_ids=mask.astype(np.int32),
        )
        samples.append(Sample(trajectory=trajectory, advantages=(mask * rng.normal()).astype(np.float32)))
    return samples


def median_s(step: Callable[[], Any], repeats: int) -> float:
    step()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def rill_step(samples: list[Sample], **values: Any) -> Callable[[], Any]:
    algorithm = Algorithm(AlgorithmConfig.model_validate({"type": "grpo"}))
    config = PolicyTrainer.Config(
        model=ModelConfig(shape=SHAPE), optimizer={"learning_rate": 1e-6}, micro_batch_tokens=8192, **values
    )
    trainer = PolicyTrainer(config, algorithm)
    return lambda: trainer.update(samples)


def plain_step(samples: list[Sample]) -> Callable[[], Any]:
    """What a straightforward trainer does: padded batch, full logits of the completion, log-softmax, AdamW."""
    model = load_model(ModelConfig(shape=SHAPE), dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    ids = torch.tensor(np.stack([s.trajectory.token_ids for s in samples])).long()
    advantages = torch.tensor([s.advantages[-1] for s in samples])

    def step() -> None:
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, PROMPT - 1 : -1]
        logprobs = torch.log_softmax(logits, dim=-1).gather(-1, ids[:, PROMPT:, None])[..., 0]
        ratio = (logprobs - logprobs.detach()).exp()
        loss = -torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def trl_step(samples: list[Sample]) -> Callable[[], Any]:
    """GRPOTrainer's own loss on a prepared batch, so that generation and rewards take no part."""
    import tempfile

    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from rill.models.tokenizer import build_char_tokenizer

    model = load_model(ModelConfig(shape=SHAPE), dtype=torch.float32)
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=8, num_generations=8, beta=0.0, bf16=False,
        report_to=[], use_cpu=True, max_completion_length=COMPLETION, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model,
        args=arguments,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 8),
        processing_class=build_char_tokenizer(),
    )
    ids = torch.tensor(np.stack([s.trajectory.token_ids for s in samples])).long()
    mask = torch.ones(NUM_COMPLETIONS, COMPLETION, dtype=torch.long)
    batch = {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": torch.ones_like(ids[:, :PROMPT]),
        "completion_ids": ids[:, PROMPT:],
        "completion_mask": mask,
        "advantages": torch.tensor([s.advantages[-1] for s in samples]),
        "num_items_in_batch": mask.sum(),
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1

    def step() -> None:
        loss = trainer._compute_loss(trainer.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    samples = make_samples()
    tokens = sum(s.num_tokens for s in samples)
    peers = {"plain transformers": plain_step}
    if find_spec("trl") is not None and find_spec("datasets") is not None:
        peers["trl"] = trl_step
    rates = {}
    for name, build in peers.items():
        rates[name] = tokens / median_s(build(samples), args.repeats)
        report(name=f"training_cpu/{name}", tokens_per_s=rates[name])
    for dtype in args.dtypes.split(","):
        for tree in (False, True):
            step = rill_step(samples, compute_dtype=dtype, tree_packing=tree)
            rate = tokens / median_s(step, args.repeats)
            times = {f"times_{n.replace(' ', '_')}": rate / r for n, r in rates.items()}
            report(name=f"training_cpu/rill/{dtype}{'/tree' if tree else ''}", tokens_per_s=rate, **times)


if __name__ == "__main__":
    main()
