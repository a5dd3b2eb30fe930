"""Packages for verifiers run unmodified, in a Python of their own.

The fast tests play a package of the classic kind with a stand-in for verifiers, which shows the way of an episode:
tasks, server, requests to the agent's address, rewards. With RILL_VERIFIERS_PYTHON naming an interpreter that has
verifiers (and its repository's glossary and kuhn-poker), the slow test plays those.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from rill.envs.verifiers.tasks import VerifiersTasks
from rill.errors import ConfigError
from rill.types import Failure, Prompt
from tests.data.templates import HERMES, tokenizer_for
from tests.envs.scripted import Scripted, environment, play

VERIFIERS = """
import sys
import httpx

class Client:
    def __init__(self, config):
        self.config = config
    async def close(self):
        pass

class Sums:
    requires_group_rollouts = False
    def __init__(self, size):
        self.rows = [
            {"prompt": [{"role": "user", "content": f"{n}+{n}="}], "answer": str(n + n)} for n in range(size)
        ]
    def get_dataset(self):
        return self.rows
    async def run_rollout(self, row, client, model, sampling):
        async with httpx.AsyncClient(trust_env=False, timeout=60.0) as http:
            body = {"model": model, "messages": row["prompt"]}
            answer = await http.post(f"{client.config.api_base_url}/chat/completions", json=body)
        if answer.status_code != 200:
            return {"reward": 0.0, "error": {"type": "ModelError", "message": answer.text}}
        said = answer.json()["choices"][0]["message"]["content"]
        if said == "die":
            import os
            os._exit(3)
        return {"reward": float(said == row["answer"]), "metrics": {"length": len(said)}}

def load_environment(name, size=3):
    print("packages print")
    return Sums(size)
"""
LINGERING = """
import subprocess, threading, time
subprocess.Popen(["sleep", "601.5"])
threading.Thread(target=time.sleep, args=(600,)).start()
def load_environment(): pass
"""
CLIENTS = "from verifiers import Client as resolve_client"
TYPES = "class ClientConfig:\n    def __init__(self, **fields):\n        self.__dict__.update(fields)"


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter with a stand-in for verifiers and two packages, one of which is broken."""
    packages = tmp_path / "packages"
    (packages / "verifiers").mkdir(parents=True)
    (packages / "verifiers" / "__init__.py").write_text(VERIFIERS)
    (packages / "verifiers" / "clients.py").write_text(CLIENTS)
    (packages / "verifiers" / "types.py").write_text(TYPES)
    (packages / "sums.py").write_text("def load_environment(): pass\n")
    (packages / "broken.py").write_text("import a_library_that_is_not_there\n")
    (packages / "lingering.py").write_text(LINGERING)
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}" exec "{sys.executable}" "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


def tasks_of(python: str, name: str = "sums", **settings: Any) -> VerifiersTasks:
    return VerifiersTasks(VerifiersTasks.Config(python=python, id=name, **settings))


async def played(python: str, task: Prompt, *replies: Any) -> Any:
    tokenizer = tokenizer_for(HERMES)
    env = environment("verifiers", tokenizer, python=python, id="sums")
    return await play(env, Scripted(*replies, tokenizer=tokenizer, ends="<|im_end|>"), task)


async def test_an_episode_is_a_run_of_the_package_with_the_tokens_that_were_sampled(python: str) -> None:
    tasks = tasks_of(python, arguments={"size": 5}, limit=4)
    assert [task.answer for task in tasks] == ["0", "2", "4", "6"]  # type: ignore[attr-defined]
    assert tasks[2].messages[0].content == "2+2="
    episode = await played(python, tasks[2], "4")
    (sample,) = episode.samples
    assert episode.failure is None and episode.rewards == {"policy": 1.0}
    assert sample.num_sampled == 2 and sample.loss_mask.sum() == 2
    assert episode.metrics["length"] == 1.0
    assert not [
        p for p in psutil.Process().children(recursive=True) if "guest.py serve" in " ".join(p.cmdline())
    ], "the server ends with its environment"


async def test_a_package_that_dies_costs_its_episode_and_starts_again(python: str) -> None:
    tasks, tokenizer = tasks_of(python), tokenizer_for(HERMES)
    env = environment("verifiers", tokenizer, python=python, id="sums")
    policy = Scripted("die", "0", tokenizer=tokenizer, ends="<|im_end|>")
    close, env.close = env.close, lambda: None  # type: ignore[method-assign]
    try:
        first = await play(env, policy, tasks[0])
        assert first.failure is Failure.ENVIRONMENT and "died" in str(first.error)
        assert first.samples[0].num_sampled > 0, "what was sampled is kept"
        assert (await play(env, policy, tasks[0])).rewards == {"policy": 1.0}
    finally:
        close()


def test_what_is_wrong_with_a_package_is_told_when_its_tasks_are_read(python: str) -> None:
    with pytest.raises(ConfigError, match="there is no Python at"):
        tasks_of("/nowhere/python")
    with pytest.raises(ConfigError, match=r"broken does not start: [\s\S]*a_library_that_is_not_there"):
        tasks_of(python, "broken")


def test_a_package_that_does_not_end_when_its_tasks_are_read_is_ended(
    python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rill.envs.verifiers.server.CLOSE_S", 0.5)
    assert len(tasks_of(python, "lingering")) == 3
    assert not [p for p in psutil.process_iter(["cmdline"]) if "601.5" in (p.info["cmdline"] or ())]


async def test_tasks_of_another_data_set_are_refused(python: str) -> None:
    episode = await played(python, Prompt(id="p", text="?"), "4")
    assert episode.failure is Failure.ENVIRONMENT and 'data.type = "verifiers"' in str(episode.error)


REAL = os.environ.get("RILL_VERIFIERS_PYTHON", "")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not REAL, reason="RILL_VERIFIERS_PYTHON names no interpreter with verifiers")
@pytest.mark.parametrize("name", ["glossary", "kuhn-poker"])
async def test_packages_of_verifiers_own_repository_play_to_their_end(name: str) -> None:
    tokenizer = tokenizer_for(HERMES)
    task = tasks_of(REAL, name, limit=1)[0]

    def speak(text: str) -> str:
        if name == "kuhn-poker":
            return "[check]" if "[check]" in text.rpartition("legal actions")[2] else "[call]"
        if "<tool_response>" in text:
            fact = text.rpartition("<tool_response>")[2].partition("</tool_response>")[0].strip()
            return f"<answer>{fact}</answer>"
        who = task.messages[-1].content.split('"')[1]
        return f'<tool_call>\n{{"name": "facts_lookup", "arguments": {{"name": "{who}"}}}}\n</tool_call>'

    env = environment("verifiers", tokenizer, python=REAL, id=name)
    episode = await play(env, Scripted(speak, tokenizer=tokenizer, ends="<|im_end|>"), task)
    assert episode.failure is None, episode.error
    wanted = {"policy": 1.0} if name == "glossary" else {"player0": -1.0, "player1": 1.0}
    assert episode.rewards == wanted


CLASSIC = os.environ.get("RILL_VERIFIERS_031_PYTHON", "")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not CLASSIC, reason="RILL_VERIFIERS_031_PYTHON names no interpreter with verifiers 0.3.1")
async def test_the_vault_as_a_package_of_verifiers_has_the_tokens_of_the_built_in_one(tmp_path: Path) -> None:
    wrapper = tmp_path / "python"
    examples = Path(__file__).parents[2] / "examples"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH="{examples}" exec "{CLASSIC}" "$@"\n')
    wrapper.chmod(0o755)
    task = tasks_of(str(wrapper), "vault_for_verifiers", limit=1)[0]
    question = task.messages[-1].content

    def solver(seen: str) -> str:
        found = re.findall(r"\[(\w+)\]", seen)
        return f"={found[-1]}" if len(found) == 2 else f"><get>{found[-1] if found else question[4:6]}</get>"

    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    env = environment("verifiers", python=str(wrapper), id="vault_for_verifiers", chat_template=template)
    policy, own = Scripted(solver), Scripted(solver)
    episode = await play(env, policy, task)
    assert episode.rewards == {"policy": 1.0}, episode.error
    plain = Prompt(id="p", text=question, answer=task.answer, metadata={"level": 2})
    expected = await play(environment("vault"), own, plain)
    assert episode.samples[0].token_ids.tolist() == expected.samples[0].token_ids.tolist()
    assert policy.names == own.names, "the same requests get the same answers: equal curves"
