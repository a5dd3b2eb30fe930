"""Talking to a model in the terminal, and sending it to the hub: it is asked as it was trained."""

from __future__ import annotations

import io
import json
import shutil
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from rill.cli.chat import Conversation
from rill.cli.main import app
from rill.dashboard.indexer import bring_up_to_date, rollouts
from rill.data.chat import PromptEncoder
from rill.errors import ModelError
from rill.inference.base import Completion, Delta, Request
from rill.models.card import BARE_TEMPLATE, TrainingCard, read_card
from rill.models.loading import ModelConfig, load_model
from rill.models.tokenizer import build_char_tokenizer
from rill.telemetry.evaluations import load, newest
from rill.telemetry.rollouts import each_group
from rill.telemetry.run import Run
from rill.types import SamplingParams, StopReason
from tests.hub import fake_hub

SHAPE = {
    "model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 32, "vocab_size": 104, "max_position_embeddings": 64,
}  # fmt: skip
BARE = TrainingCard(run="sums-1", workflow="grpo", prompts="bare", example="1+1=", max_new_tokens=5)


class Echo:
    """An engine that answers "7" and notes what it was asked."""

    max_context = 64

    def __init__(self) -> None:
        self.tokenizer = build_char_tokenizer()
        self.asked: list[str] = []

    def submit(self, requests: list[Request], on_delta: Any) -> list[Future[Completion]]:
        [request] = requests
        self.asked.append(str(self.tokenizer.decode(request.token_ids.tolist())))
        ids = np.asarray(self.tokenizer.encode("7"), np.int32)
        numbers = {"token_ids": ids, "logprobs": np.zeros(1, np.float32), "versions": np.zeros(1, np.int32)}
        on_delta(Delta(request_id=request.id, **numbers))
        future: Future[Completion] = Future()
        future.set_result(Completion(request_id=request.id, stop_reason=StopReason.EOS, **numbers))
        return [future]


def talk(monkeypatch: pytest.MonkeyPatch, text: str, *, is_bare: bool, system: str = "") -> list[str]:
    engine = Echo()
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    conversation = Conversation(
        engine,  # type: ignore[arg-type]
        PromptEncoder(engine.tokenizer),
        SamplingParams(),
        system=system,
        is_bare=is_bare,
    )
    conversation.run()
    return engine.asked


def test_a_conversation_goes_on_until_a_new_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = talk(monkeypatch, "a\nb\n/new\n\nc\n", is_bare=False, system="s")
    assert asked == [
        "<system>s<user>a<assistant>",
        "<system>s<user>a<assistant>7<eos><user>b<assistant>",
        "<system>s<user>c<assistant>",
    ]
    assert capsys.readouterr().out.split() == ["7", "7", "7"]


def test_a_bare_model_is_asked_as_it_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    assert talk(monkeypatch, "1+1=\n2+2=\n", is_bare=True) == ["1+1=", "2+2="]


def test_what_is_too_long_is_told_and_the_chat_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, "1" * 70 + "\n1\n", is_bare=True) == ["1"]
    assert "context of 64 tokens" in capsys.readouterr().out


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "sums"
    load_model(ModelConfig(shape=SHAPE, tokenizer="chars"), dtype=torch.float32).save_pretrained(folder)
    build_char_tokenizer().save_pretrained(folder)
    BARE.save(folder)
    return folder


def test_a_models_folder_answers_in_chat_and_travels_over_the_hub(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = CliRunner().invoke(app, ["chat", str(model), "engine.num_kv_blocks=16"], input="1+1=\n")
    assert result.exit_code == 0, result.output
    assert result.stderr == "", "it is asked as it was trained, and nothing needs to be said"
    assert len(result.stdout.splitlines()) >= 1
    with fake_hub(tmp_path, monkeypatch) as hub:
        result = CliRunner().invoke(app, ["push", str(model), "me/sums"])
        assert result.exit_code == 0, result.output
        page = (hub.repo("models", "me/sums") / "README.md").read_text()
        assert "tags: [rill, grpo]" in page and "    1+1=" in page
        assert read_card(hub.repo("models", "me/sums")) == BARE


def fails(*_: object) -> float:
    raise ValueError("no reward today")


def test_an_evaluation_asks_as_training_did(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n')
    asked = ["eval", str(model), "--task", "jsonl", f"data.path={rows}", "engine.num_kv_blocks=16", "num_prompts=1",
             "sampling.max_new_tokens=3", "-o", str(tmp_path / "answers.jsonl")]  # fmt: skip
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    assert "held_out: jsonl, 1 sample(s) at temperature 0, 1 prompts" in result.stdout
    kept = load(tmp_path / "answers.jsonl")
    [answer] = kept.answers
    assert (answer.prompt, answer.expected, kept.config["data"]["form"]) == ("1+1=", "2", "bare")
    assert answer.num_tokens >= 1
    result = CliRunner().invoke(
        app, [*asked, "env.reward.type=function", f"env.reward.function={__name__}:fails"]
    )
    assert result.exit_code == 1 and "every episode failed" in result.stderr, "nothing was measured"


def test_an_evaluation_of_an_agent_tells_what_it_took_and_its_transcripts_are_in_the_viewer(
    model: Path, tmp_path: Path
) -> None:
    config = '[data]\ntype = "vault"\n[rollout.env]\ntype = "vault"\n[rollout.sampling]\nmax_new_tokens = 3\n'
    run = Run.create("agent", root=tmp_path, config_toml=config)
    shutil.copytree(model, run.path / "model")
    asked = ["eval", "agent", "--root", str(tmp_path), "engine.num_kv_blocks=16", "num_prompts=2", "samples=2",
             "sampling.temperature=1.0", "temperature=1.0", "--json"]  # fmt: skip
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    metrics = json.loads(result.stdout)
    assert metrics["eval/turns"] == metrics["eval/turns_low"] == 1.0 and metrics["eval/pass@2"] == 0.0
    assert 1.0 <= metrics["eval/sampled_tokens_low"] <= metrics["eval/sampled_tokens"] <= 3.0
    assert metrics["eval/read_tokens"] == 7.0, "abc:k7?"
    kept = newest(run)
    assert kept is not None and kept.answers[0].metrics["turns"] == 1.0
    bring_up_to_date(run.path)
    shown = rollouts(run.path)
    group = shown.group(0, 0)
    assert shown.num_groups == 2 and (group["evaluates"], group["step"]) == ("eval-0001 held_out", 0)
    assert list(each_group(run)) == [], "what training recorded"
    apart = CliRunner().invoke(app, [*asked, "-o", str(tmp_path / "apart.jsonl")])
    assert apart.exit_code == 0, apart.output
    logs = [path.name for path in (run.path / "rollouts").glob("eval-*.jsonl")]
    assert logs == ["eval-0001.jsonl"], "one kept elsewhere does not take the number of the run's next"


def test_a_chat_model_is_asked_with_the_arguments_of_its_training() -> None:
    card = replace(BARE, prompts="chat", template_arguments={"thinking": False})
    template = card.template("{{ messages[0].content }}{% if thinking %}<think>{% endif %}")
    tokenizer = build_char_tokenizer()
    asked = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(asked, chat_template=template, tokenize=False) == "a"
    told = tokenizer.apply_chat_template(asked, chat_template=template, tokenize=False, thinking=True)
    assert told == "a<think>"


def test_a_card_says_how_a_model_is_asked(tmp_path: Path) -> None:
    assert read_card(tmp_path) is None
    BARE.save(tmp_path)
    assert read_card(tmp_path) == BARE and BARE.template("its own") == BARE_TEMPLATE
    (tmp_path / "rill.json").write_text('{"run": 1}')
    with pytest.raises(ModelError, match="is damaged"):
        read_card(tmp_path)
