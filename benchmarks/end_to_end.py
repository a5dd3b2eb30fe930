"""rill beside TRL's GRPOTrainer on a CPU: samples and tokens per second of whole steps, reward at equal samples.

    python benchmarks/end_to_end.py --trl-python VENV/bin/python [--steps 10] [--rounds 2] [--dtype float32]
    python benchmarks/end_to_end.py --trl-python … --steps 40 --seeds 5 --rounds 1      learning curves

TRL lives in an environment of its own (pip install torch==2.13.0 trl==1.16.0 transformers==5.22.2); without
--trl-python it is made in --trl-venv. Both sides run as processes of their own, in turns, so that a busy moment of the
machine hits both. Same for both: a Qwen2 of 5 M parameters (256 wide, 4 layers, vocabulary 4,096) from one folder,
prompts of 16 tokens, groups of 8, 64 completions of at most 64 tokens a step, one AdamW update (rate, betas, clipping,
constant schedule), GRPO's loss without KL, temperature 1, the same number of threads and the same precision. The
reward is the share of even token ids in the completion: it starts near one half, and every sample tells something.

Prints JSON lines: one per step, one per process, and at the end the ratio of the medians after --skip steps, and the
mean reward of the last quarter of the steps on each side.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

from report import report

SHAPE: dict[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 1024, "vocab_size": 4096, "max_position_embeddings": 512, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TRL_PACKAGES = ("torch==2.13.0", "trl==1.16.0", "transformers==5.22.2")
GROUP_SIZE, NUM_PROMPTS, MAX_TOKENS, PROMPT_TOKENS = 8, 8, 64, 16
BETAS, MAX_NORM = (0.9, 0.95), 1.0
TIMEOUT_S = 900


def even_share(token_ids: list[int]) -> float:
    """The reward, for both sides."""
    return sum(token % 2 == 0 for token in token_ids) / max(1, len(token_ids))


def rill_reward(prompt: Any, response_text: str, trajectory: Any) -> float:
    return even_share(trajectory.token_ids[trajectory.loss_mask].tolist())


# --- what both sides read ---------------------------------------------------------------------------------------


def write_inputs(folder: Path, seed: int, num_rows: int) -> None:
    """The model with its tokenizer (one word per id), and the prompts."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    Qwen2ForCausalLM(Qwen2Config(**SHAPE)).save_pretrained(folder / "model")
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    words = special + [f"w{i}" for i in range(len(special), SHAPE["vocab_size"])]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder / "model")
    rng = random.Random(seed)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(num_rows):
            text = " ".join(words[rng.randrange(len(special), len(words))] for _ in range(PROMPT_TOKENS))
            file.write(json.dumps({"prompt": text, "answer": "-"}) + "\n")


# --- rill -------------------------------------------------------------------------------------------------------


def run_rill(args: argparse.Namespace) -> None:
    from rill.telemetry.run import Run
    from rill.workflows.grpo import GRPO
    from rill.workflows.loop import StepReport

    folder = Path(args.folder)
    recipe = {
        "workflow": "grpo",
        "seed": args.seed,
        "model": {"path": str(folder / "model")},
        "data": {"type": "jsonl", "path": str(folder / "prompts.jsonl"), "form": "bare"},
        "rollout": {
            "group_size": GROUP_SIZE,
            "sampling": {"max_new_tokens": MAX_TOKENS, "temperature": 1.0},
            "engine": {"type": "native", "dtype": args.dtype, "num_kv_blocks": 1024},
            "env": {
                "type": "single_turn",
                "reward": {"type": "function", "function": "end_to_end:rill_reward", "run_in": "inline"},
            },
        },
        "algorithm": {"type": "grpo"},
        "trainer": {
            "compute_dtype": args.dtype,
            "max_grad_norm": MAX_NORM,
            "optimizer": {"learning_rate": args.lr, "betas": BETAS, "weight_decay": 0.0},
        },
        "loop": {"steps": args.steps, "prompts_per_step": NUM_PROMPTS},
        "eval": {"every": 0, "num_prompts": 1, "max_new_tokens": 1},
        "cluster": {"devices": 1, "threads": args.threads},
    }
    recipe["data"]["held_out"] = 0.01

    def observe(step: StepReport) -> None:
        if step.step > 0:
            m = step.metrics
            sampled = m["length/response"] * GROUP_SIZE * NUM_PROMPTS
            print_step("rill", args, step.step, m["time/step_s"], sampled, m["reward/mean"])

    config = GRPO.Config.model_validate(recipe)
    GRPO(config, Run.create("rill", root=folder), [observe]).run()


# --- TRL --------------------------------------------------------------------------------------------------------


def run_trl(args: argparse.Namespace) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    folder = Path(args.folder)
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    lengths: list[int] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths[:] = [len(ids) for ids in completion_ids]
        return [even_share(ids) for ids in completion_ids]

    class Clock(TrainerCallback):  # type: ignore[misc]
        """A step is measured from its begin, without the trainer's logging, to the log that ends it."""

        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds = time.perf_counter() - self.began

        def on_log(self, _: Any, state: Any, __: Any, logs: dict[str, float], **___: Any) -> None:
            if "reward" in logs:
                print_step("trl", args, state.global_step, self.seconds, float(sum(lengths)), logs["reward"])

    config = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, seed=args.seed, report_to=[], save_strategy="no",
        per_device_train_batch_size=GROUP_SIZE * NUM_PROMPTS, gradient_accumulation_steps=1, num_iterations=1,
        num_generations=GROUP_SIZE, max_completion_length=MAX_TOKENS, temperature=1.0, beta=0.0, loss_type="grpo",
        learning_rate=args.lr, lr_scheduler_type="constant", adam_beta1=BETAS[0], adam_beta2=BETAS[1],
        max_grad_norm=MAX_NORM, weight_decay=0.0, max_steps=args.steps, logging_steps=1, disable_tqdm=True,
        bf16=args.dtype == "bfloat16", gradient_checkpointing=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model", padding_side="left")
    dataset = Dataset.from_list([{"prompt": row["prompt"]} for row in rows])
    GRPOTrainer(
        model=model, reward_funcs=reward, args=config, train_dataset=dataset, processing_class=tokenizer,
        callbacks=[Clock()],
    ).train()  # fmt: skip


def print_step(
    system: str, args: argparse.Namespace, step: int, seconds: float, tokens: float, reward: float
) -> None:
    report(system=system, seed=args.seed, step=step, seconds=seconds, tokens=tokens, reward=reward)


# --- the comparison ---------------------------------------------------------------------------------------------


def in_process(
    system: str, python: str, args: argparse.Namespace, seed: int, folder: Path
) -> list[dict[str, Any]]:
    command = [
        python,
        str(Path(__file__).resolve()),
        "--role",
        system,
        "--folder",
        str(folder),
        "--seed",
        str(seed),
    ]
    for name in ("steps", "threads", "dtype", "lr"):
        command += [f"--{name}", str(getattr(args, name))]
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
    env.pop("PYTHONPATH", None) if system == "trl" else None
    began = time.perf_counter()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"system"')]
    if done.returncode or len(lines) < args.steps:
        sys.stderr.write(done.stdout[-3000:] + done.stderr[-6000:])
        raise SystemExit(f"{system} ended with {done.returncode} after {len(lines)} of {args.steps} steps")
    for line in lines:
        report(**line)
    report(process=system, seed=seed, wall_s=round(time.perf_counter() - began, 1))
    return lines


def trl_python(args: argparse.Namespace) -> str:
    if args.trl_python:
        return str(args.trl_python)
    python = Path(args.trl_venv) / "bin" / "python"
    if not python.exists():
        report(part="making an environment for TRL", folder=args.trl_venv)
        venv.create(args.trl_venv, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *TRL_PACKAGES], check=True)
    return str(python)


def compare(args: argparse.Namespace) -> None:
    steps: dict[str, list[dict[str, Any]]] = {"rill": [], "trl": []}
    pythons = {"rill": sys.executable, "trl": trl_python(args)}
    with tempfile.TemporaryDirectory(prefix="end-to-end-") as root:
        for seed in range(args.seeds):
            for number in range(args.rounds):
                folder = Path(root) / f"{seed}-{number}"
                folder.mkdir()
                write_inputs(folder, seed, max(512, 2 * args.steps * NUM_PROMPTS))
                for system in ("rill", "trl") if number % 2 == 0 else ("trl", "rill"):
                    steps[system] += in_process(system, pythons[system], args, seed, folder)
    figures = {system: summarise(lines, args) for system, lines in steps.items()}
    for system, values in figures.items():
        report(result=system, dtype=args.dtype, threads=args.threads, **values)
    report(
        result="ratio",
        tokens_per_s=round(figures["rill"]["tokens_per_s"] / figures["trl"]["tokens_per_s"], 2),
        samples_per_s=round(figures["rill"]["samples_per_s"] / figures["trl"]["samples_per_s"], 2),
        reward_difference=round(figures["rill"]["last_reward"] - figures["trl"]["last_reward"], 4),
        goal=4.0,
    )


def summarise(lines: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, float]:
    """Medians over all steps after the first `skip`; the last quarter's reward, its spread over seeds."""
    warm = [line for line in lines if line["step"] > args.skip]
    last = [line for line in lines if line["step"] > args.steps * 3 // 4]
    by_seed = [
        statistics.fmean(line["reward"] for line in last if line["seed"] == seed)
        for seed in sorted({line["seed"] for line in last})
    ]
    return {
        "step_s": round(statistics.median(line["seconds"] for line in warm), 4),
        "tokens_per_s": round(statistics.median(line["tokens"] / line["seconds"] for line in warm), 1),
        "samples_per_s": round(GROUP_SIZE * NUM_PROMPTS / statistics.median(x["seconds"] for x in warm), 2),
        "first_reward": round(statistics.fmean(line["reward"] for line in lines if line["step"] == 1), 4),
        "last_reward": round(statistics.fmean(by_seed), 4),
        "last_reward_sd": round(statistics.stdev(by_seed), 4) if len(by_seed) > 1 else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trl-python", default="", help="a Python that has TRL")
    parser.add_argument("--trl-venv", default="trl-venv", help="where to make one, if none is given")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--skip", type=int, default=2, help="steps of each process that do not count")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--role", choices=("compare", "rill", "trl"), default="compare", help=argparse.SUPPRESS
    )
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    {"compare": compare, "rill": run_rill, "trl": run_trl}[args.role](args)


if __name__ == "__main__":
    main()
