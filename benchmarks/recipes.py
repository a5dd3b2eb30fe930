"""What the recipes reach: each run to its end, held-out accuracy and reward before and after, time, and its curves.

    python benchmarks/recipes.py                               every recipe that needs no GPU and no download
    python benchmarks/recipes.py demo --seeds 5 --jobs 2       one recipe with five seeds, two at a time
    python benchmarks/recipes.py grpo_smollm2 grpo_gym grpo_lora       the pretrained model (see docs/recipes.md)
    RILL_VERIFIERS_PYTHON=~/vf/bin/python python benchmarks/recipes.py reverse_text       a package of verifiers

Runs stand in --root; a run that has finished there is read and not made again, so a benchmark that was interrupted goes
on. The curves of seed 0 are drawn into --curves, `docs/curves` unless told otherwise. Prints a JSON line a run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from report import report

from rill.dashboard.curves import write_curves
from rill.errors import RillError
from rill.telemetry.metrics import accuracies, read_metrics
from rill.telemetry.run import Run, RunStatus

TINY = (
    "demo",
    "grpo_arithmetic",
    "grpo_async",
    "grpo_vlm",
    "ppo_arithmetic",
    "sft_arithmetic",
    "sft_then_grpo",
    "dapo_math",
    "dpo_arithmetic",
    "reward_model_arithmetic",
    "rlhf_ppo",
    "vault",
    "code",
    "lake",
    "nim",
)
"""In this order: those after sft_arithmetic start from its model, rlhf_ppo also from the reward model."""
REPOSITORY = Path(__file__).resolve().parents[1]
NUM_ROWS = 20_000
TIMEOUT_S = 3600


def dapo_on_the_tiny_model(root: Path) -> list[str]:
    """dapo_math is written for a GPU and your data; here the tiny model and JSON lines of sums stand in for them."""
    from rill.data.base import Split
    from rill.data.tasks.arithmetic import ArithmeticDataset

    path = root / "sums.jsonl"
    sums = ArithmeticDataset(ArithmeticDataset.Config(digits=(3, 3)), Split.TRAIN)
    rows = ({"question": sums[i].text, "answer": f"#### {sums[i].answer}"} for i in range(NUM_ROWS))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [
        f"model.path={root / 'sft_arithmetic' / 'model'}", f"data.path={path}", "data.form=bare",
        'data.template="{question}"', "rollout.group_size=8", "rollout.sampling.max_new_tokens=48",
        "rollout.max_concurrent=256", "rollout.engine.max_num_seqs=256", "rollout.engine.num_kv_blocks=2048",
        "algorithm.filters.overlong.limit_tokens=48", "algorithm.filters.overlong.buffer_tokens=8",
        "trainer.compute_dtype=float32", "trainer.compile=false", "trainer.optimizer.learning_rate=1e-4",
        "loop.steps=40", "loop.prompts_per_step=32", "eval.every=5",
    ]  # fmt: skip


def words_to_reverse(root: Path) -> list[str]:
    """What reverse_text names and does not come with: its rows, and a Python that has the package."""
    rows, python = root / "words_to_reverse", os.environ["RILL_VERIFIERS_PYTHON"]
    subprocess.run([sys.executable, REPOSITORY / "examples" / "reverse_text_rows.py", rows], check=True)
    source = {"python": python, "arguments.taskset.dataset_name": rows / "words"}
    named = [f"{table}.{key}={value}" for table in ("data", "rollout.env") for key, value in source.items()]
    return [*named, f"sft.data.path={rows / 'warm_up.jsonl'}"]


def changes_of(recipe: str, root: Path) -> list[str]:
    if recipe == "dapo_math":
        return dapo_on_the_tiny_model(root)
    if recipe == "reverse_text":
        return words_to_reverse(root)
    sections = {"model": "sft_arithmetic", "reward_model.model": "reward_model_arithmetic"}
    changes = {section: f"{section}.path={root / run / 'model'}" for section, run in sections.items()}
    if recipe in ("sft_then_grpo", "dpo_arithmetic", "reward_model_arithmetic"):
        return [changes["model"]]
    return list(changes.values()) if recipe == "rlhf_ppo" else []


def finished(name: str, root: Path) -> Run | None:
    try:
        run = Run.open(name, root=root)
    except RillError:
        return None
    return run if run.state().status is RunStatus.FINISHED else None


def train(recipe: str, name: str, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """Run it in a process of its own; what an interrupted one left behind is removed."""
    shutil.rmtree(args.root / name, ignore_errors=True)
    threads = [f"cluster.threads={args.threads}"] if args.threads else []
    command = [sys.executable, "-m", "rill.cli.main", "train", recipe, f"seed={seed}", *threads]
    began_s = time.monotonic()
    with (args.root / f"{name}.log").open("w") as log:
        subprocess.run(
            [*command, *changes_of(recipe, args.root), "--root", str(args.root), "--name", name],
            stdout=log,
            stderr=log,
            check=True,
            timeout=TIMEOUT_S,
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    return {"wall_s": round(time.monotonic() - began_s, 1)}


def figures_of(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rows = read_metrics(run.path)
    measured = accuracies(name for row in rows for name in row.values)
    for name in (*measured, "reward/mean", "length/response", "sft/loss", "eval/loss"):
        values = [row.values[name] for row in rows if name in row.values]
        if values:
            found[name] = [round(values[0], 4), round(values[-1], 4)]
    return found


def measure(recipe: str, seed: int, args: argparse.Namespace) -> None:
    name = recipe if seed == 0 else f"{recipe}-{seed}"
    run = finished(name, args.root)
    times = {} if run is not None else train(recipe, name, seed, args)
    run = run or Run.open(name, root=args.root)
    report(recipe=recipe, seed=seed, **figures_of(run), **times)
    if seed == 0:
        write_curves(run, args.curves / f"{recipe}.svg")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", nargs="*", default=list(TINY))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs at a time; with more than one, times say little"
    )
    parser.add_argument("--threads", type=int, default=0, help="of each worker; 0: as the recipe says")
    parser.add_argument("--root", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--curves", type=Path, default=REPOSITORY / "docs" / "curves")
    args = parser.parse_args()
    args.root = args.root.resolve()
    for folder in (args.root, args.curves):
        folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as jobs:
        for done in [jobs.submit(measure, r, seed, args) for r in args.recipes for seed in range(args.seeds)]:
            done.result()


if __name__ == "__main__":
    main()
