"""The verifiers package against `rill serve`: a real environment's rollouts, scored by verifiers.

verifiers wants an older openai than rill's tests, so it may live in a Python of its own, which RILL_VERIFIERS_PYTHON
names (0.4) and RILL_VERIFIERS_CLASSIC_PYTHON (0.3, with its classic environments).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.inference.plain_http import http
from tests.inference.scripted_model import write_scripted_model
from tests.inference.serve_process import rill_serve

PROGRAM = Path(__file__).with_name("verifiers_rollout.py")
CLASSIC_PROGRAM = Path(__file__).with_name("verifiers_classic_rollout.py")
PROMPT, ANSWER = [5, 80, 81, 6], [48, 77, 84, 84, 87, 9, 2]  # <user>hi<assistant>, Hello!<eos>

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def verifiers_python(variable: str) -> str:
    named = os.environ.get(variable)
    if named is None and importlib.util.find_spec("verifiers") is not None:
        named = sys.executable
    if named is None:
        pytest.skip(f"verifiers is not installed here and {variable} names no Python that has it")
    return named


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = write_scripted_model(tmp_path_factory.mktemp("models") / "scripted", "Hello!", len(PROMPT))
    with rill_serve(folder, "engine.num_kv_blocks=256", environment={"RILL_API_KEYS": "k"}) as (_, url):
        yield url, folder


def rollouts(kind: str, served: tuple[str, Path], home: Path) -> list[dict[str, Any]]:
    url, folder = served
    command = [verifiers_python("RILL_VERIFIERS_PYTHON"), str(PROGRAM), kind, url, folder.name, str(folder)]
    return run_program(command, home)


def run_program(command: list[str], home: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        command,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "RILL_KEY": "k"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_an_evaluation_is_scored_through_chat_completions(served: tuple[str, Path], tmp_path: Path) -> None:
    rows = rollouts("eval", served, tmp_path)
    assert len(rows) == 4
    for row in rows:
        assert row["ok"] and not row["errors"] and row["reward"] == 1.0
        assert row["contents"][0] == "Hello!" and len(row["contents"]) == 2


def test_training_rollouts_carry_the_engines_tokens_and_logprobs(
    served: tuple[str, Path], tmp_path: Path
) -> None:
    rows = rollouts("train", served, tmp_path)
    assert len(rows) == 4
    for row in rows:
        assert row["ok"] and not row["errors"] and row["reward"] == 1.0
        ids, mask, logprobs = row["token_ids"], row["sampled_mask"], row["logprobs"]
        assert len(ids) == len(mask) == len(logprobs)
        first = len(PROMPT) + len(ANSWER)
        assert ids[:first] == PROMPT + ANSWER
        assert mask[:first] == [False] * len(PROMPT) + [True] * len(ANSWER)
        assert not any(mask[first : first + 7]) and all(mask[first + 7 :]), (
            "<user>go on<assistant>, then tokens"
        )
        _check_logprobs(served[0], ids, mask, logprobs)


def test_a_classic_environment_stitches_its_turns_from_the_engines_tokens(
    served: tuple[str, Path], tmp_path: Path
) -> None:
    python = verifiers_python("RILL_VERIFIERS_CLASSIC_PYTHON")
    rows = run_program([python, str(CLASSIC_PROGRAM), served[0], served[1].name], tmp_path)
    assert len(rows) == 4
    for row in rows:
        assert row["error"] is None and row["reward"] == 1.0
        first, second = row["steps"]
        assert first["prompt_ids"] == PROMPT and first["completion_ids"] == ANSWER
        follow_up = second["prompt_ids"][len(PROMPT) + len(ANSWER) :]
        assert second["prompt_ids"] == PROMPT + ANSWER + follow_up and len(follow_up) == 7
        ids, mask, logprobs = [], [], []
        for step, start in ((first, 0), (second, len(PROMPT) + len(ANSWER))):
            prompt = step["prompt_ids"][start:]
            ids += prompt + step["completion_ids"]
            mask += [False] * len(prompt) + [True] * len(step["completion_ids"])
            logprobs += [0.0] * len(prompt) + step["completion_logprobs"]
        _check_logprobs(served[0], ids, mask, logprobs)


def _check_logprobs(url: str, ids: list[int], mask: list[bool], logprobs: list[float]) -> None:
    """What verifiers would train on is what the engine says of these tokens when asked again."""
    body = {"token_ids": ids, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}}
    answer = http.post(
        f"{url}/inference/v1/generate", json=body, headers={"Authorization": "Bearer k"}, timeout=60
    ).json()
    again = [0.0, *(next(iter(e.values()))["logprob"] for e in answer["prompt_logprobs"][1:])]
    sampled = np.array(mask)
    assert np.allclose(np.array(again)[sampled], np.array(logprobs)[sampled], atol=1e-4)
    assert np.array(logprobs)[sampled].max() < 0 and not np.array(logprobs)[~sampled].any()
