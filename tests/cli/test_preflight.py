"""What is found before anything starts. Every case here once cost a warm-up, or was never told."""

from __future__ import annotations

import asyncio
import math
from importlib.util import find_spec
from pathlib import Path

import pytest

from rill.cli.preflight import preflight
from rill.config.files import load_recipe
from rill.config.resolve import resolve
from rill.envs.agent import Agents
from rill.envs.base import Environment
from rill.errors import ConfigError, DataError, GuardError, MissingExtraError, ModelError, UserError
from rill.types import Prompt, Trajectory
from rill.workers.records import Outcome
from rill.workflows import recipe_schema
from rill.workflows.config import RecipeConfig
from rill.workflows.evaluation import Evaluation
from tests.e2e.faults import foreign_tokenizer

TINY = Path(__file__).parents[1] / "e2e" / "tiny.toml"


def tiny(*changes: str) -> RecipeConfig:
    loaded = load_recipe(TINY, changes)
    config = resolve(recipe_schema(loaded.values), loaded.values, loaded.provenance)
    assert isinstance(config, RecipeConfig)
    return config


def broken_reward(prompt: Prompt, response: str, trajectory: Trajectory) -> float:
    return {"right": 1.0}[response + "?"]


def broken_at_times(prompt: Prompt, response: str, trajectory: Trajectory) -> float:
    broken_at_times.calls += 1  # type: ignore[attr-defined]
    if broken_at_times.calls == 1:  # type: ignore[attr-defined]
        raise KeyError("the first time")
    return 1.0


broken_at_times.calls = 0  # type: ignore[attr-defined]


def rows(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "rows.jsonl"
    path.write_text(text, encoding="utf-8")
    return ["data.type=jsonl", f"data.path={path}", "data.form=bare", "eval.num_prompts=0"]


def unanswered(index: int, seed: int) -> Prompt:
    return Prompt(id=f"p{index}", text=f"{index}+{seed}=")


def test_a_warm_up_imitates_data_of_its_own_where_the_runs_has_no_written_answers() -> None:
    asked = [
        "data.type=generated",
        "data.function=tests.cli.test_preflight:unanswered",
        "data.form=bare",
    ]
    asked += ["eval.num_prompts=0", "sft.steps=1"]
    with pytest.raises(DataError, match="p0 has no written solution"):
        preflight(tiny(*asked))
    assert preflight(tiny(*asked, "sft.data.type=arithmetic")) == []


def test_what_can_run_has_nothing_to_be_told() -> None:
    assert preflight(tiny()) == []


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        (["rollout.sampling.max_new_tokens=500"], ConfigError, "does not fit the model's context of 128"),
        (["data.type=jsonl", "data.path=nowhere.jsonl"], DataError, "there is no file 'nowhere.jsonl'"),
        (["data.type=jsonl", "data.path=."], DataError, "is a folder: name a file"),
        (["placement.actor=1"], ConfigError, r"placement.actor: .* no device 1; .*cluster.devices"),
        pytest.param(
            ["rollout.engine.type=vllm"],
            MissingExtraError,
            r"needs vLLM: pip install 'rill\[vllm\]'",
            marks=pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is here"),
        ),
        (["model.path=./nowhere"], ModelError, "there is no model folder"),
        (['guard_actions={"lagg"="stop"}'], ConfigError, "guard 'lagg'"),
        (
            ["rollout.engine.draft_model.path=./nowhere", "rollout.engine.num_speculative_tokens=4"],
            ModelError,
            "there is no model folder",
        ),
        (
            ["rollout.engine.tensor_parallel_size=3"],
            ConfigError,
            "does not divide the model's 2 attention heads",
        ),
        (
            ["rollout.env.reward.function=tests.cli.test_preflight:broken_reward"],
            UserError,
            r"KeyError: .*test_preflight\.py:\d+ in broken_reward",
        ),
    ],
)
def test_what_cannot_run_is_one_line(changes: list[str], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        preflight(tiny(*changes))


def test_a_reward_that_fails_now_and_then_is_no_reason_to_stop() -> None:
    function = "tests.cli.test_preflight:broken_at_times"
    assert preflight(tiny(f"rollout.env.reward.function={function}")) == []


class Endless(Environment):
    class Config(Environment.Config):
        pass

    async def run(self, task: Prompt, agents: Agents) -> float:
        await asyncio.sleep(1e6)
        return 0.0


class Insistent(Environment):
    """Asks until it hears what it will not hear."""

    class Config(Environment.Config):
        pass

    async def run(self, task: Prompt, agents: Agents) -> float:
        for _ in range(2000):
            if (await agents.policy.generate(task)).text == "done":
                break
        return 0.0


@pytest.mark.parametrize("environment", ["Endless", "Insistent"])
def test_an_environment_that_takes_its_time_is_a_note(
    monkeypatch: pytest.MonkeyPatch, environment: str
) -> None:
    monkeypatch.setattr("rill.cli.preflight.TRY_S", 0.05)
    [note] = preflight(tiny(f"rollout.env.type=tests.cli.test_preflight:{environment}"))
    assert "not finished after 0.05 s" in note


class Client(Environment):
    """Kept from episode to episode, as a connection would be; the first one is in vain."""

    class Config(Environment.Config):
        pass

    loop: asyncio.AbstractEventLoop | None = None

    async def run(self, task: Prompt, agents: Agents) -> float:
        if self.loop is None:
            self.loop = asyncio.get_running_loop()
            raise ConnectionError("not yet")
        assert self.loop is asyncio.get_running_loop()
        await agents.policy.generate(task)
        return 0.0


class Silent(Environment):
    """Asks nobody."""

    class Config(Environment.Config):
        pass

    async def run(self, task: Prompt, agents: Agents) -> float:
        return 1.0


def test_an_environment_that_never_asks_is_found_before_a_run() -> None:
    with pytest.raises(
        UserError, match=r"test_preflight:Silent' never asked the policy for anything: its run\(\) has to"
    ):
        preflight(tiny("rollout.env.type=tests.cli.test_preflight:Silent"))


def test_what_an_environment_keeps_works_in_the_next_episode() -> None:
    assert preflight(tiny("rollout.env.type=tests.cli.test_preflight:Client")) == []


def test_rows_without_anything_in_them_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is empty"):
        preflight(tiny(*rows(tmp_path, "\n\n")))


def test_an_answer_that_the_tokenizer_cannot_write_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot write its answer '漢'"):
        preflight(tiny(*rows(tmp_path, '{"question": "1", "answer": "漢"}\n')))
    [note] = preflight(tiny(*rows(tmp_path, '{"question": "漢", "answer": "1"}\n')))
    assert "does not know all characters" in note


def test_a_tokenizer_that_is_not_the_models_own_is_told(tmp_path: Path) -> None:
    model, tokenizer = foreign_tokenizer(tmp_path, tiny().model)  # type: ignore[attr-defined]
    assert preflight(tiny(model, f"model.tokenizer={tmp_path / 'model'}")) == []
    [note] = preflight(tiny(model, tokenizer))
    assert "2 of its" in note and "other text than it learnt" in note


def test_a_draft_model_that_reads_other_tokens_is_found_before_a_run(tmp_path: Path) -> None:
    foreign_tokenizer(tmp_path, tiny().model)  # type: ignore[attr-defined]
    drafts = [
        "rollout.engine.num_speculative_tokens=4",
        f"rollout.engine.draft_model.path={tmp_path / 'model'}",
    ]
    assert preflight(tiny(*drafts)) == []
    with pytest.raises(
        ConfigError, match="draft_model has another vocabulary than model: token .* there and"
    ):
        preflight(tiny(*drafts, f"rollout.engine.draft_model.tokenizer={tmp_path / 'other'}"))


def test_a_prompt_that_leaves_no_room_is_a_note(tmp_path: Path) -> None:
    text = '{"question": "1", "answer": "1"}\n{"question": "' + "1" * 120 + '", "answer": "1"}\n'
    [note] = preflight(tiny(*rows(tmp_path, text)))
    assert "rows/1 has 12" in note


def test_a_row_longer_than_the_context_is_told_wherever_it_stands(tmp_path: Path) -> None:
    short = '{"question": "1", "answer": "1"}\n'
    long = short.replace('"question": "1"', '"question": "' + "1" * 60_000 + '"')
    changes = rows(tmp_path, short * 900 + long + short * 99)
    with pytest.raises(DataError, match=r"rows/900 has 60000 tokens and the model's context is 128"):
        preflight(tiny(*changes))
    [note] = preflight(tiny(*changes, "trainer.on_too_long=skip"))
    assert "1 of the 128 looked at" in note


def test_a_row_too_long_to_imitate_is_told(tmp_path: Path) -> None:
    short = '{"question": "1", "answer": "1"}\n'
    long = short.replace('"answer": "1"', '"answer": "' + "1" * 600 + '"')
    changes = rows(tmp_path, short * 99 + long)
    with pytest.raises(DataError, match=r"rows/99: 602 tokens, the limit is 512"):
        preflight(tiny(*changes, "sft.steps=1", "trainer.micro_batch_tokens=512"))


def test_a_first_evaluation_in_which_all_fails_ends_the_run() -> None:
    evaluation = Evaluation({})
    evaluation.check_some_succeeded()
    failed = Outcome(index=0, purpose="held_out", rewards=(math.nan,), error="KeyError: 'x' (mine.py:3)")
    evaluation.collect(failed)
    with pytest.raises(GuardError, match="mine.py:3"):
        evaluation.check_some_succeeded()
    evaluation.collect(Outcome(index=1, purpose="held_out", rewards=(0.0,)))
    evaluation.check_some_succeeded()
