"""A GRPO update on the CPU: rill's PolicyTrainer beside TRL's GRPOTrainer, same model, batch, loss and precision.

    python benchmarks/training_cpu.py --trl-python VENV/bin/python [--repeats 10] [--rounds 2] [--threads 2]

A Qwen2 of 5 million parameters (256 wide, 4 layers, vocabulary 4,096), 64 completions of 64 tokens after prompts of 16,
groups of 8, one AdamW step with clipping, GRPO's loss without KL. Counted: tokens of prompts and completions per second
of the training part of a step. For rill that is `update(samples)`: checks, packing, loss, backward, optimizer. TRL runs
its own `train()` on the same batch; its clock starts when the loss is asked for, after generation and rewards (which
hand out the prepared batch here), and stops when the optimizer step is done. Each runs in a process of its own, in
turns, so that a busy moment of the machine hits both. TRL's environment: see end_to_end.py.

Prints JSON lines: one per process (median and best seconds, least processor seconds), and per precision the ratio of
the medians. `recompute` is PolicyTrainer.logprobs on the same samples, `tree` is tree_packing = true. On a machine that
does other work, `times_trl_processor` with --threads 1 says more than the clock.
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

from end_to_end import (
    BETAS,
    GROUP_SIZE,
    MAX_NORM,
    MAX_TOKENS,
    NUM_PROMPTS,
    PROMPT_TOKENS,
    SHAPE,
    trl_python,
    write_inputs,
)
from report import report

NUM_TOKENS = GROUP_SIZE * NUM_PROMPTS * (PROMPT_TOKENS + MAX_TOKENS)
GOAL = 2.0
TIMEOUT_S = 600


def make_batch() -> tuple[Any, Any]:
    """(token ids [64, 80], advantage of each completion), the same in every process."""
    import numpy as np

    rng = np.random.default_rng(0)
    prompts = rng.integers(4, SHAPE["vocab_size"], (NUM_PROMPTS, PROMPT_TOKENS)).repeat(GROUP_SIZE, axis=0)
    answers = rng.integers(4, SHAPE["vocab_size"], (len(prompts), MAX_TOKENS))
    return np.concatenate([prompts, answers], axis=1), rng.normal(size=len(prompts)).astype(np.float32)


def seconds_of(step: Callable[[], Any], repeats: int) -> list[tuple[float, float]]:
    """(seconds, processor seconds of all threads) of every step after the first."""
    step()
    times = []
    for _ in range(repeats):
        began = now()
        step()
        times.append(since(began))
    return times


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def since(began: tuple[float, float]) -> tuple[float, float]:
    return time.perf_counter() - began[0], time.process_time() - began[1]


# --- rill -------------------------------------------------------------------------------------------------------


def make_samples() -> list[Any]:
    import numpy as np

    from rill.types import Sample, Trajectory

    ids, advantages = make_batch()
    mask = np.arange(ids.shape[1]) >= PROMPT_TOKENS
    samples = []
    for index, tokens in enumerate(ids.astype(np.int32)):
        trajectory = Trajectory(
            id=str(index),
            group_id=str(index // GROUP_SIZE),
            prompt_id=str(index // GROUP_SIZE),
            token_ids=tokens,
            logprobs=np.where(mask, -8.3, 0.0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            loss_mask=mask,
            turn_ids=mask.astype(np.int32),
        )
        samples.append(
            Sample(trajectory=trajectory, advantages=(mask * advantages[index]).astype(np.float32))
        )
    return samples


def make_trainer(folder: Path, **values: Any) -> Any:
    from rill.algorithms import Algorithm, AlgorithmConfig
    from rill.models.loading import ModelConfig
    from rill.training.policy import PolicyTrainer

    config = PolicyTrainer.Config(
        model=ModelConfig(path=str(folder / "model")),
        optimizer={"learning_rate": 1e-6, "betas": BETAS},
        max_grad_norm=MAX_NORM,
        **values,
    )
    return PolicyTrainer(config, Algorithm(AlgorithmConfig.model_validate({"type": "grpo"})))


def run_rill(args: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(args.threads)
    samples = make_samples()
    trainer = make_trainer(Path(args.folder), compute_dtype=args.dtype, compile=args.compile)
    finish("rill", args, seconds_of(lambda: trainer.update(samples), args.repeats))
    finish("rill/recompute", args, seconds_of(lambda: trainer.logprobs(samples), args.repeats))
    tree = make_trainer(Path(args.folder), compute_dtype=args.dtype, tree_packing=True)
    finish("rill/tree", args, seconds_of(lambda: tree.update(samples), args.repeats))


# --- TRL --------------------------------------------------------------------------------------------------------


def run_trl(args: argparse.Namespace) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    folder = Path(args.folder)
    ids, advantages = make_batch()
    prompts, answers = torch.tensor(ids).split([PROMPT_TOKENS, MAX_TOKENS], dim=1)
    times: list[tuple[float, float]] = []

    class Prepared(GRPOTrainer):  # type: ignore[misc]
        """Hands out the prepared batch where TRL would generate and score."""

        began = (0.0, 0.0)

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            return {
                "prompt_ids": prompts,
                "prompt_mask": torch.ones_like(prompts),
                "completion_ids": answers,
                "completion_mask": torch.ones_like(answers),
                "advantages": torch.tensor(advantages),
                "num_items_in_batch": torch.tensor(float(answers.numel())),
            }

        def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
            Prepared.began = now()
            return super().compute_loss(*arguments, **keywords)

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(since(Prepared.began))

    config = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no",
        per_device_train_batch_size=len(ids), gradient_accumulation_steps=1, num_iterations=1,
        num_generations=GROUP_SIZE, max_completion_length=MAX_TOKENS, temperature=1.0, beta=0.0, loss_type="grpo",
        learning_rate=1e-6, lr_scheduler_type="constant", adam_beta1=BETAS[0], adam_beta2=BETAS[1],
        max_grad_norm=MAX_NORM, weight_decay=0.0, max_steps=args.repeats + 1, disable_tqdm=True,
        bf16=args.dtype == "bfloat16", gradient_checkpointing=False,
    )  # fmt: skip
    Prepared(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "w5 w6"}] * len(ids)),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder / "model", padding_side="left"),
        callbacks=[Clock()],
    ).train()
    finish("trl", args, times[1:])


# --- the comparison ---------------------------------------------------------------------------------------------


def finish(system: str, args: argparse.Namespace, times: list[tuple[float, float]]) -> None:
    report(system=system, dtype=args.dtype, times=times)


def in_process(system: str, python: str, args: argparse.Namespace, dtype: str, folder: str) -> dict[str, Any]:
    command = [python, __file__, "--role", system, "--folder", folder, "--dtypes", dtype]
    command += ["--repeats", str(args.repeats), "--threads", str(args.threads)]
    command += ["--compile"] if args.compile else []
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
    env.pop("PYTHONPATH", None) if system == "trl" else None
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"system"')]
    if done.returncode or not lines:
        sys.stderr.write(done.stdout[-3000:] + done.stderr[-6000:])
        raise SystemExit(f"{system} ended with {done.returncode}")
    for line in lines:
        report(
            process=line["system"],
            dtype=dtype,
            step_s=round(statistics.median(wall for wall, _ in line["times"]), 4),
            best_s=round(min(wall for wall, _ in line["times"]), 4),
            processor_s=round(min(processor for _, processor in line["times"]), 4),
        )
    return {line["system"]: line["times"] for line in lines}


def compare(args: argparse.Namespace) -> None:
    pythons = {"rill": sys.executable, "trl": trl_python(args)}
    with tempfile.TemporaryDirectory(prefix="training-cpu-") as folder:
        write_inputs(Path(folder), seed=0, num_rows=1)
        for dtype in args.dtypes.split(","):
            times: dict[str, list[tuple[float, float]]] = {}
            for number in range(args.rounds):
                for system in ("rill", "trl") if number % 2 == 0 else ("trl", "rill"):
                    for name, values in in_process(system, pythons[system], args, dtype, folder).items():
                        times.setdefault(name, []).extend(values)
            rates = {
                name: NUM_TOKENS / statistics.median(w for w, _ in values) for name, values in times.items()
            }
            least = {name: min(processor for _, processor in values) for name, values in times.items()}
            report(
                result=f"training_cpu/{dtype}",
                threads=args.threads,
                tokens_per_s={name: round(rate) for name, rate in rates.items()},
                times_trl=round(rates["rill"] / rates["trl"], 2),
                tree_times_trl=round(rates["rill/tree"] / rates["trl"], 2),
                times_trl_processor=round(least["trl"] / least["rill"], 2),
                recompute_times_training=round(rates["rill/recompute"] / rates["rill"], 2),
                goal=GOAL,
                holds=rates["rill"] >= GOAL * rates["trl"],
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl-python", default="", help="a Python that has TRL")
    parser.add_argument("--trl-venv", default="trl-venv", help="where to make one, if none is given")
    parser.add_argument("--repeats", type=int, default=10, help="steps of a process that count")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--compile", action="store_true", help="rill's layers through torch.compile")
    parser.add_argument(
        "--role", choices=("compare", "rill", "trl"), default="compare", help=argparse.SUPPRESS
    )
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.dtype = args.dtypes
    {"compare": compare, "rill": run_rill, "trl": run_trl}[args.role](args)


if __name__ == "__main__":
    main()
