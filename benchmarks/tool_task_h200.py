"""A pretrained model learns to use a tool: SmolLM2-135M-Instruct on questions that only a look-up can answer.

    python benchmarks/tool_task_h200.py [--steps 40] [--root runs] [--small]

The chains of rill.data.tasks.vault, asked in words: every vault holds other values, so nothing can be known by heart.
The model is shown two conversations of the kind, calls `get` in the Hermes format, reads what it is told, and calls
again or answers; right answers are all that is rewarded, and there is no warm-up. GRPO with 32 questions × 16 episodes
a step on one GPU that engine and trainer share. Prints a JSON line a step: reward, calls and turns an episode,
malformed calls, and at every tenth the share of held-out questions answered greedily. --small is a smoke test on any
machine.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from report import report

from rill.config.files import load_recipe
from rill.data.tasks.vault import look_up
from rill.envs.agent import Agents
from rill.envs.rewards.answers import AnswerForm, extract_answer
from rill.telemetry.run import Run
from rill.types import Message, Prompt
from rill.workflows.grpo import GRPO
from rill.workflows.loop import StepReport

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
MAX_TURNS = 4
SYSTEM = (
    "You look things up in vaults with the tool get. A vault holds a key or a number under each key. "
    "Follow the keys until you find a number, and answer with it."
)
TEMPLATE = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""ChatML with Hermes' calls, and `tool` as a role: the model's own template knows of neither."""
METRICS = ("reward/mean", "rollout/tool_calls", "rollout/turns", "rollout/malformed_calls", "eval/accuracy")


def _call(key: str) -> Message:
    function = {"name": "get", "arguments": {"key": key}}
    return Message(role="assistant", content="", tool_calls=({"type": "function", "function": function},))


def question(vault: str, key: str) -> str:
    return f"What does vault {vault} hold at the end of the chain that begins with {key}?"


def example(vault: str, *chain: str) -> list[Message]:
    """A conversation that goes right. `chain`: the key that is asked for, what lies there, and so on to the number."""
    looked_up = [
        message
        for key, found in pairwise(chain)
        for message in (_call(key), Message(role="tool", content=found))
    ]
    asked, answer = question(vault, chain[0]), f"The answer is {chain[-1]}."
    return [
        Message(role="user", content=asked),
        *looked_up,
        Message(role="assistant", content=answer),
    ]


SHOWN_FIRST = [
    Message(role="system", content=SYSTEM),
    *example("xyz", "m3", "p5", "27"),
    *example("ohb", "c8", "64"),
]


async def run(task: Prompt, agents: Agents) -> float:
    """rollout.env.function."""
    vault, _, first = str(task.text).removesuffix("?").partition(":")
    num_calls, num_hops = 0, int(task.metadata["level"])

    async def get(key: str) -> str:
        """What lies under a key: another key, or at the end of a chain a number."""
        nonlocal num_calls
        num_calls += 1
        return look_up(vault, key, is_last=num_calls >= num_hops)

    asked = Message(role="user", content=question(vault, first))
    reply = await agents.policy.act([*SHOWN_FIRST, asked], [get], max_turns=MAX_TURNS)
    return float(extract_answer(reply.text, AnswerForm.LAST_NUMBER) == task.answer)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    values = load_recipe(RECIPES / "parts" / ("smollm2.toml" if args.small else "one_gpu.toml")).values
    values["model"] = {"path": args.model}
    values.setdefault("sync", {})["canary_tolerance"] = 0.12  # recipes/parts/smollm2.toml says why
    values["rollout"] |= {
        "group_size": args.group_size,
        "sampling": {"max_new_tokens": 48, "temperature": 1.0},
        "env": {"type": "function", "function": "tool_task_h200:run", "chat_template": TEMPLATE},
    }
    values["trainer"]["optimizer"] = {"learning_rate": args.rate}
    return values | {
        "workflow": "grpo",
        "seed": args.seed,
        "data": {"type": "vault", "levels": [1, 2]},
        "algorithm": {"type": "grpo"},
        "loop": {"steps": args.steps, "prompts_per_step": args.prompts, "checkpoint_every": 0},
        "eval": {"every": 10, "num_prompts": args.held_out},
        "cluster": {**values.get("cluster", {}), "devices": 1},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="package:smollm2-135m-instruct")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--held-out", type=int, default=256)
    parser.add_argument("--rate", type=float, default=3e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path, default=Path("runs"))
    parser.add_argument("--small", action="store_true", help="a smoke test on any machine")
    args = parser.parse_args()
    if args.small:
        args.steps, args.prompts, args.group_size, args.held_out = 1, 2, 2, 2
    elif not torch.cuda.is_available():
        report(skipped="needs a CUDA device; --small runs anywhere")
        return
    began_s = time.monotonic()

    def observe(step: StepReport) -> None:
        found = {name: round(step.metrics[name], 4) for name in METRICS if name in step.metrics}
        report(step=step.step, wall_s=round(time.monotonic() - began_s, 1), **found)

    GRPO(
        GRPO.Config.model_validate(settings_of(args)), Run.create("tool-task", root=args.root), [observe]
    ).run()


if __name__ == "__main__":
    main()
