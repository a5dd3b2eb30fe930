"""Claim: a model that is trained with products of 8 bits learns what it learns without.

    python benchmarks/fp8_training.py [--recipe demo] [--seeds 0] [--root DIR] [--svg FILE]

Trains the recipe in bf16 with `trainer.fp8` and without, from the same seeds. Prints a JSON line a run: its held-out
accuracy by step. On a CPU the codes are multiplied in float32, which shows what rounding does and nothing of the speed;
that is `training_h200.py --fp8`. A run that has finished in --root is read and not made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from report import report

from rill.dashboard.curves import draw
from rill.telemetry.metrics import read_metrics

REPOSITORY = Path(__file__).resolve().parents[1]
TIMEOUT_S = 3600


def train(name: str, args: argparse.Namespace, *changes: str) -> None:
    if (args.root / name / "model" / "config.json").exists():
        return
    command = [sys.executable, "-m", "rill.cli.main", "train", args.recipe, "trainer.compute_dtype=bfloat16"]
    with (args.root / f"{name}.log").open("w") as log:
        subprocess.run(
            [*command, *changes, "--root", str(args.root), "--name", name],
            stdout=log,
            stderr=log,
            check=True,
            timeout=TIMEOUT_S,
            cwd=REPOSITORY,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--root", type=Path, default=Path("runs/fp8"))
    parser.add_argument("--svg", type=Path, help="draw the first seed's curves into this file")
    args = parser.parse_args()
    args.root.mkdir(parents=True, exist_ok=True)
    panels = []
    for seed in args.seeds:
        for fp8 in (False, True):
            what = "fp8" if fp8 else "bf16"
            name = f"{args.recipe}-{what}-{seed}"
            train(name, args, f"trainer.fp8={json.dumps(fp8)}", f"seed={seed}")
            rows = read_metrics(args.root / name)
            series = {
                key: [(row.step, row.values[key]) for row in rows if key in row.values]
                for key in sorted({key for row in rows for key in row.values})
            }
            accuracy = next(series[key] for key in series if key.endswith("/accuracy"))
            report(recipe=args.recipe, seed=seed, products=what, accuracy=accuracy)
            if seed == args.seeds[0]:
                panels += [(f"accuracy, {what}", accuracy), (f"reward, {what}", series["reward/mean"])]
    if args.svg:
        args.svg.write_text(draw(panels))


if __name__ == "__main__":
    main()
