"""A model learns to use a tool, by whatever way the tool is reached."""

from __future__ import annotations

from pathlib import Path

import pytest

from rill.cli.driver import carry_out
from rill.config.resolve import dump_config
from rill.telemetry.metrics import read_metrics
from rill.telemetry.run import Run
from rill.workflows import WORKFLOWS
from tests.e2e.tiny import INVARIANT, fingerprint, resolved
from tests.forks import forked_agents

RECIPE = Path(__file__).parents[2] / "recipes" / "vault.toml"
HTTP = (
    "rollout.env.type=function",
    "rollout.env.function=examples.own_agent:run",
    'rollout.env.chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"',
)
MCP = ("rollout.env.type=function", "rollout.env.function=examples.own_mcp:run")


def trained(root: Path, name: str, *overrides: str) -> Run:
    config = resolved(RECIPE, overrides)
    run = Run.create(name, root=root, config_toml=dump_config(config))
    with run.running(), forked_agents():
        WORKFLOWS.load(config.workflow)(config, run, ()).run()
    return run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_weights_come_of_a_built_in_tool_a_black_box_agent_and_an_mcp_server(tmp_path: Path) -> None:
    short = ("loop.steps=2", "loop.prompts_per_step=4", "sft.steps=5", "eval.every=0", INVARIANT)
    prints = {
        name: fingerprint(trained(tmp_path, name, *short, *way))
        for name, way in (("tool", ()), ("http", HTTP), ("mcp", MCP))
    }
    assert len(set(prints.values())) == 1, prints


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_tool_that_is_needed_is_learnt_by_step_24(tmp_path: Path, seed: int) -> None:
    config = resolved(RECIPE, (f"seed={seed}",))
    run = Run.create("vault", root=tmp_path, config_toml=dump_config(config))
    carry_out(config, run)
    rows = [row.values for row in read_metrics(run.path)]
    rewards = [values["reward/mean"] for values in rows if "reward/mean" in values]
    held_out = [values["eval/accuracy"] for values in rows if "eval/accuracy" in values]
    assert held_out[0] < 0.1 and held_out[-1] >= 0.95, held_out
    assert sum(rewards[-6:]) / 6 >= 0.95, rewards[::6]
    calls = [values["rollout/tool_calls"] for values in rows if "rollout/tool_calls" in values]
    assert calls[-1] > 1.5 > calls[0]
