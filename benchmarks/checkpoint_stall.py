"""How long a checkpoint holds up training: whole runs without checkpoints, with one every fifth step, with one a step.

    python benchmarks/checkpoint_stall.py [--recipe demo] [--steps 20] [--rounds 3] [KEY=VALUE …]

Prints JSON lines:

    {"what": "run", "every": …, "step_s": …, "stall_s": …, "share": …}
                          one run: the median step, the mean stall of the steps that followed a checkpoint (waiting for
                          the one before, copying, and making the manifest), and all stalls over all steps
    {"what": "checkpoint", "every": …, "share": …, "low": …, "high": …, "slower": …}
                          of all rounds: the median share with the range of the rounds, and the median step against
                          that of the run without checkpoints in the same round

The recipe decides the device: on a GPU give one that runs there, as in `--recipe grpo_qwen2.5_1.5b_h200`. The default
has a model of 24 million parameters, whose checkpoint has 0.3 GB. The first step of a run is left out. Needs a quiet
machine and a disk that takes a checkpoint in less than a step; else the share says that it does not.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from report import report

from rill.config.files import load_recipe
from rill.config.resolve import dump_config, resolve
from rill.telemetry.metrics import MetricLog, read_metrics
from rill.telemetry.run import Run
from rill.workflows import WORKFLOWS, recipe_schema

SHAPE = (
    "{model_type='qwen2',hidden_size=512,num_hidden_layers=8,num_attention_heads=8,num_key_value_heads=2,"
    "intermediate_size=1536,vocab_size=104,max_position_embeddings=512,tie_word_embeddings=true}"
)
CPU_SETTINGS = (f"model.shape={SHAPE}", "sft.steps=1", "loop.prompts_per_step=8", "eval.num_prompts=0")
EVERY = (0, 5, 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args()
    settings = [*(() if given.recipe else CPU_SETTINGS), *given.settings, f"loop.steps={given.steps}"]
    shares: dict[int, list[float]] = {every: [] for every in EVERY}
    slower: dict[int, list[float]] = {every: [] for every in EVERY}
    for nth in range(given.rounds):
        steps_s: dict[int, float] = {}
        for every in EVERY[:: 1 if nth % 2 else -1]:
            found = measure(given.recipe or "demo", [*settings, f"loop.checkpoint_every={every}"], every)
            report(what="run", every=every, **found)
            steps_s[every] = found["step_s"]
            shares[every].append(found["share"])
        for every, step_s in steps_s.items():
            slower[every].append(step_s / steps_s[0] - 1)
    for every in EVERY[1:]:
        row = {
            "share": statistics.median(shares[every]),
            "low": min(shares[every]),
            "high": max(shares[every]),
        }
        row["slower"] = statistics.median(slower[every])
        report(what="checkpoint", every=every, **row)


def measure(recipe: str, settings: list[str], every: int) -> dict[str, float]:
    """A whole run; its stalls lie in the step after the checkpoint."""
    values = load_recipe(recipe, settings)
    config = resolve(recipe_schema(values.values, str(values.path)), values.values, values.provenance)
    with tempfile.TemporaryDirectory() as root:
        run = Run.create("stall", root=Path(root), config_toml=dump_config(config))
        metrics = MetricLog(run.path)
        with run.running():
            WORKFLOWS.load(values.values["workflow"])(
                config, run, [lambda report: metrics.write(report.step, report.metrics)]
            ).run()
        metrics.close()
        rows = [row for row in read_metrics(run.path) if row.step > 1 and "time/checkpoint_s" in row.values]
    steps_s = [row.values["time/step_s"] for row in rows]
    stalls_s = [row.values["time/checkpoint_s"] for row in rows]
    after_s = [
        stall_s for row, stall_s in zip(rows, stalls_s, strict=True) if every and (row.step - 1) % every == 0
    ]
    return {
        "step_s": round(statistics.median(steps_s), 4),
        "stall_s": round(statistics.fmean(after_s), 5) if after_s else 0.0,
        "share": round(sum(stalls_s) / sum(steps_s), 5),
    }


if __name__ == "__main__":
    main()
