"""A whole GRPO step on one shared GPU: 256 prompts × 16 samples of up to 1,024 tokens, and where its time goes.

    python benchmarks/grpo_step_h200.py [--steps 1] [--groups 256] [--sigma 0.7] [--no-compile] [--small]
    python benchmarks/grpo_step_h200.py --no-resident --steps 5 --checkpoint-every 2 [--folder /dev/shm/run]

Real parts throughout: a Cluster, the GRPO workflow, an engine and a trainer in processes of their own that take
turns on the device. The model has the shape of Qwen2.5-1.5B with random bf16 weights, made on the device once.
Response lengths are log-normal (median 384, sigma 0.7, at most 1,024), set by the sample's id with end-of-sequence
ignored (benchmarks/longtail.py); --sigma 0 --median 1024 makes every response 1,024 tokens long. A first step with
responses of 32 tokens compiles and captures everything; the steps after it count. Prints JSON lines:

    step      wall time of each phase as the loop sees it, tokens/s, figures of the trainer
    phases    where the device's time went, from the trace: rollout, training, and the switches between them
    switching onload + offload + weight sync as a share of the step; the goal is 3 %

With --checkpoint-every a step that follows a checkpoint shows in `time/checkpoint_s` what that held up, and in its
other times what writing it beside the step costs. The last checkpoint and export are not made: the run is left when
its last step is reported. --small is a smoke test on any machine.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from report import report
from shapes import QWEN_1_5B, SMALL

from rill.telemetry import trace
from rill.telemetry.run import Run
from rill.workflows.grpo import GRPO
from rill.workflows.loop import StepReport

SWITCHES = ("onload", "offload")
SYNC = "actor.sync"
PROMPT_TOKENS = 256


class EnoughError(Exception):
    """The last step is reported: leave the run without its final checkpoint."""


def save_random_model(folder: Path, shape: dict[str, Any], device: str) -> None:
    """Drawn on the device: 1.5 billion numbers take a GPU no time and a CPU half a minute."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(shape)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()


def recipe(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    is_cuda = torch.cuda.is_available()
    context = args.max_tokens + PROMPT_TOKENS
    engine: dict[str, Any] = {
        "type": "native",
        "max_num_seqs": args.sequences,
        "max_context": context,
        "num_kv_blocks": args.sequences * context // 16 + 64,
        "max_batched_tokens": 16384,
    }
    trainer: dict[str, Any] = {
        "compute_dtype": "bfloat16",
        "micro_batch_tokens": args.micro,
        "optimizer": {"learning_rate": 1e-6},
        "tree_packing": args.tree_packing,
        "compile": is_cuda and not args.no_compile,
    }
    if is_cuda:
        trainer["head_chunk_bytes"] = 5 * 2**29
    return {
        "workflow": "grpo",
        "model": {"path": str(model), "tokenizer": "chars"},
        "data": {"type": "generated", "function": "longtail:random_question", "held_out": 0.0},
        "rollout": {
            "engine": engine,
            "group_size": args.group_size,
            "max_concurrent": 2 * args.sequences,
            "sampling": {"max_new_tokens": args.max_tokens, "temperature": 1.0},
            "log_groups": 0,
            "env": {
                "type": "longtail:LongTail",
                "median_tokens": args.median,
                "sigma": args.sigma,
                "max_tokens": args.max_tokens,
                "warmup_groups": args.groups,
            },
        },
        "algorithm": {"type": "grpo"},
        "trainer": trainer,
        "loop": {
            "steps": args.steps + 1,
            "prompts_per_step": args.groups,
            "step_timeout_s": args.timeout,
            "checkpoint_every": args.checkpoint_every,
            "keep_checkpoints": 1,
        },
        "eval": {"num_prompts": 0},
        "sync": {
            "canary_tolerance": 0.05,
            "timeout_s": args.timeout,
            "transport": {"type": "cuda_ipc" if is_cuda else "shm"},
        },
        "cluster": {"devices": 1, "colocate": args.resident},
    }


def run(args: argparse.Namespace, folder: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.monotonic()
    save_random_model(folder / "model", SMALL if args.small else QWEN_1_5B, device)
    report(part="model", seconds=time.monotonic() - began, device=device, torch=torch.__version__)
    config = GRPO.Config.model_validate(recipe(args, folder / "model"))
    run_folder = Run.create("grpo-step", root=folder)
    trace.configure(run_folder.path, "driver")
    last = began

    def observe(step: StepReport) -> None:
        nonlocal last
        now = time.monotonic()
        kind = {0: "start", 1: "warm-up step"}.get(step.step, "step")
        report(part=kind, step=step.step, wall_s=now - last, **step.metrics)
        last = now
        if step.step == args.steps + 1:
            raise EnoughError

    try:
        GRPO(config, run_folder, [observe]).run()
    except EnoughError:
        pass
    finally:
        trace.flush()
        report(part="end", seconds=time.monotonic() - began)
        for number in range(1, args.steps + 1):
            breakdown(run_folder.path, number)
        if args.keep:
            shutil.copytree(run_folder.path, args.keep, ignore=shutil.ignore_patterns("checkpoints", "model"))


def breakdown(run_dir: Path, number: int) -> None:
    """Where the time of one step went. Device turns are exclusive, so their parts add up to the step."""
    events = [e for e in trace.read_trace(run_dir) if e.kind == "span"]
    steps = [
        e for e in events if e.name == "step" and e.lane == "loop" and e.attributes.get("step") == number
    ]
    if not steps:
        report(part="phases", step=number, missing="the trace has no such step: it did not end")
        return
    start, end = steps[0].at_ns, steps[0].at_ns + steps[0].duration_ns
    step_s = steps[0].duration_ns / 1e9
    totals: dict[str, float] = defaultdict(float)
    for event in events:
        overlap = min(end, event.at_ns + event.duration_ns) - max(start, event.at_ns)
        if overlap <= 0 or event is steps[0]:
            continue
        if event.name in SWITCHES or event.lane == "loop":
            key = (
                f"{event.name} {event.lane.partition('[')[0]}"
                if event.name in SWITCHES
                else f"loop: {event.name}"
            )
            totals[key] += overlap / 1e9
        elif event.lane.startswith("device"):
            totals[f"device held by {event.name.partition('[')[0]}"] += overlap / 1e9
        elif event.process != "driver":
            totals[f"{event.process}: {event.name}"] += overlap / 1e9
    report(part="phases", step=number, step_s=step_s, **{k: round(v, 3) for k, v in sorted(totals.items())})
    memory_s = sum(seconds for key, seconds in totals.items() if key.split()[0] in SWITCHES)
    sync_s = sum(s for key, s in totals.items() if key.endswith((": actor.publish", f": {SYNC}")))
    # The switches that publishing causes lie inside the sync span; counted once.
    inside = overlapping(events, SYNC, SWITCHES, start, end)
    switching_s = memory_s + sync_s - inside
    report(
        part="switching", step=number, onload_offload_s=memory_s, sync_s=sync_s, switching_s=switching_s,
        share=switching_s / step_s, onload_offload_share=memory_s / step_s, goal=0.03,
    )  # fmt: skip


def overlapping(events: list[Any], outer: str, inner: tuple[str, ...], start: int, end: int) -> float:
    """Seconds that spans named `inner` spend inside those named `outer`, within a step."""
    outers = [e for e in events if e.name == outer and start <= e.at_ns < end]
    total = 0
    for one in outers:
        for event in events:
            if event.name in inner:
                stop = min(one.at_ns + one.duration_ns, event.at_ns + event.duration_ns)
                total += max(0, stop - max(one.at_ns, event.at_ns))
    return total / 1e9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1, help="measured steps, after the warm-up step")
    parser.add_argument("--groups", type=int, default=256)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--median", type=int, default=384)
    parser.add_argument("--sigma", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument(
        "--sequences", type=int, default=1024, help="sequences that the engine runs at one time"
    )
    parser.add_argument("--micro", type=int, default=8192, help="tokens of a micro-batch")
    parser.add_argument("--checkpoint-every", type=int, default=0, help="steps; 0: none")
    parser.add_argument("--tree-packing", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--timeout", type=float, default=230.0, help="seconds a step may take")
    parser.add_argument(
        "--folder", default="", help="where the model and the run go; unset: a temporary folder"
    )
    parser.add_argument("--keep", default="", help="copy metrics, trace and logs here")
    parser.add_argument(
        "--resident",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="both groups stay on the device",
    )
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    if not (args.small or torch.cuda.is_available()):
        report(skipped="needs a CUDA device; --small runs anywhere")
        return
    if args.small:
        args.groups, args.group_size, args.median, args.max_tokens = 8, 4, 16, 48
        args.sequences, args.micro = 16, 2048
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    if args.folder:
        Path(args.folder).mkdir(parents=True, exist_ok=True)
        run(args, Path(args.folder))
        return
    with tempfile.TemporaryDirectory(prefix="grpo-step-") as folder:
        run(args, Path(folder))


if __name__ == "__main__":
    main()
