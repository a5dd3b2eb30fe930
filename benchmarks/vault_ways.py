"""One task by four ways: the vault with its built-in tool, behind an MCP server, by an agent of its own over HTTP
(`base_url`), and as a package of verifiers. What the model reads is the same, token by token, so curves and trained
weights should be equal, bit by bit: the fingerprints tell.

    RILL_VERIFIERS_031_PYTHON=~/vf/bin/python python benchmarks/vault_ways.py [tool mcp base_url verifiers]

All start from one model, warmed up as the recipe does it, and have the recipe's settings at half its rate, the same
questions, and an engine whose bits do not depend on the batch. Prints a JSON line a way: reward by step, held-out
accuracy, a fingerprint of the weights, seconds. A run that has finished in --root is read and not made again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from report import report

from rill.data.tasks.vault import CLOSE, VaultDataset
from rill.telemetry.metrics import read_metrics

REPOSITORY = Path(__file__).resolve().parents[1]
TEMPLATE = 'rollout.env.chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"'
HELD_OUT = '{name="vault", num_prompts=256, data={type="vault"}, split="held_out", env={type="vault"}}'
SHOWN_STEPS = (1, 10, 20, 30, 40)
TIMEOUT_S = 3600


def ways(root: Path, num_questions: int) -> dict[str, list[str]]:
    """What each changes of the recipe."""
    own = ["data.type=vault", f"data.size={num_questions}"]
    function = [*own, "rollout.env.type=function"]
    return {
        "tool": own,
        "mcp": [*function, "rollout.env.function=examples.own_mcp:run"],
        "base_url": [*function, "rollout.env.function=examples.own_agent:run", TEMPLATE],
        "verifiers": [*verifiers(root, num_questions), TEMPLATE],
    }


def verifiers(root: Path, num_questions: int) -> list[str]:
    """The package knows nothing of rill: it is handed the recipe's questions as a file."""
    questions = VaultDataset(VaultDataset.Config(size=num_questions))
    file, python = root / "questions.txt", root / "python"
    file.write_text("".join(f"{questions[i].text}\n" for i in range(num_questions)))
    interpreter = os.environ.get("RILL_VERIFIERS_031_PYTHON", "")
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{REPOSITORY / "examples"}" exec "{interpreter}" "$@"\n')
    python.chmod(0o755)
    return [
        f"{table}.{key}={value}"
        for table in ("data", "rollout.env")
        for key, value in {
            "type": "verifiers",
            "python": str(python),
            "id": "vault_for_verifiers",
            "arguments.questions": str(file),
        }.items()
    ] + ["data.limit=0", f'rollout.sampling.stop=["{CLOSE}"]']


def train(name: str, args: argparse.Namespace, recipe: str, *changes: str) -> None:
    if (args.root / name / "model" / "config.json").exists():
        return
    command = [sys.executable, "-m", "rill.cli.main", "train", recipe, f"seed={args.seed}", *changes]
    with (args.root / f"{name}.log").open("w") as log:
        subprocess.run(
            [*command, "--root", str(args.root), "--name", name],
            stdout=log,
            stderr=log,
            check=True,
            timeout=TIMEOUT_S,
            cwd=REPOSITORY,
        )


def measure(way: str, changes: list[str], args: argparse.Namespace) -> dict[str, object]:
    run = args.root / way
    start = [f"model.path={args.root / 'warm_up' / 'model'}", "sft.steps=0", f"loop.steps={args.steps}"]
    start += ["trainer.optimizer.learning_rate=2e-4", "eval.every=10"]
    held_out = ["eval.num_prompts=0", f"eval.sets=[{HELD_OUT}]"]
    began_s = time.monotonic()
    train(way, args, "vault", *start, *held_out, "rollout.engine.batch_invariant=true", *changes)
    wall_s = time.monotonic() - began_s
    rows = {row.step: row.values for row in read_metrics(run)}
    found = {step: rows.get(step, {}) for step in range(args.steps + 1)}
    rewards = {step: round(v["reward/mean"], 4) for step, v in found.items() if "reward/mean" in v}
    return {
        "way": way,
        "reward": {step: rewards[step] for step in (*SHOWN_STEPS, args.steps) if step in rewards},
        "all_rewards": hashlib.sha256(json.dumps(rewards).encode()).hexdigest()[:12],
        "held_out": [
            round(v["eval/vault/accuracy"], 4) for v in found.values() if "eval/vault/accuracy" in v
        ],
        "weights": hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()[:12],
        "wall_s": round(wall_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ways", nargs="*", default=["tool", "mcp", "base_url", "verifiers"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--root", type=Path, default=Path("runs/vault_ways"))
    args = parser.parse_args()
    args.root = args.root.resolve()
    args.root.mkdir(parents=True, exist_ok=True)
    changes = ways(args.root, num_questions=32 * args.steps)
    train("warm_up", args, "sft_arithmetic", "data.type=vault", "data.worked=0.3")
    for way in args.ways:
        report(**measure(way, changes[way], args))


if __name__ == "__main__":
    main()
