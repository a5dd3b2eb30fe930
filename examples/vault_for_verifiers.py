"""The vault of recipes/vault.toml as a package for verifiers (0.3.1), which knows nothing of rill.

    [data]                                          [rollout.env]
    type = "verifiers"                              type = "verifiers"
    python = "~/vf/bin/python"                      python = "~/vf/bin/python"
    id = "vault_for_verifiers"                            id = "vault_for_verifiers"

with this file where that Python finds it, `rollout.sampling.stop = ["</get>"]` and the chat template of own_agent.py.
The model reads what it reads in the recipe, token by token.
"""

import hashlib
import random
from pathlib import Path

import verifiers as vf
from datasets import Dataset

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def load_environment(size: int = 1000, num_hops: int = 2, questions: str = "") -> vf.Environment:
    """`questions`: a file with one to a line. Empty: `size` of its own."""
    asked = Path(questions).read_text().splitlines() if questions else made(size)
    rows = []
    for question in asked:
        vault, _, key = question.removesuffix("?").partition(":")
        rows.append({"question": question, "answer": chain(vault, key, num_hops)[-1]})
    return Vault(num_hops, dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), max_turns=5)


def made(size: int) -> list[str]:
    rng = random.Random(0)
    return [
        f"{''.join(rng.choices(LETTERS, k=3))}:{rng.choice(LETTERS)}{rng.randint(0, 9)}?" for _ in range(size)
    ]


class Vault(vf.MultiTurnEnv):
    def __init__(self, num_hops: int, **settings: object) -> None:
        super().__init__(**settings)
        self.num_hops = num_hops

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: object) -> vf.Messages:
        vault = state["prompt"][0]["content"].partition(":")[0]
        key, hop = asked(messages) or "", len(state["trajectory"])
        return [{"role": "user", "content": f"[{look_up(vault, key, hop >= self.num_hops)}]"}]

    @vf.stop
    async def has_answered(self, state: vf.State) -> bool:
        return bool(state["trajectory"]) and asked(state["trajectory"][-1]["completion"]) is None


def asked(messages: vf.Messages) -> str | None:
    """The key in the model's last message, however it is spelt; None: it has asked for none."""
    _, mark, key = str(messages[-1]["content"]).rpartition("<get>")
    return key.removesuffix("</get>") if mark and key.endswith("</get>") else None


async def right(completion: vf.Messages, answer: str) -> float:
    return float(str(completion[-1]["content"]).rpartition("=")[2].strip() == answer)


def chain(vault: str, key: str, num_hops: int) -> list[str]:
    keys = [key]
    for hop in range(1, num_hops + 1):
        keys.append(look_up(vault, keys[-1], hop == num_hops))
    return keys


def look_up(vault: str, key: str, is_last: bool) -> str:
    digest = hashlib.blake2b(f"{vault}/{key}".encode(), digest_size=2).digest()
    return f"{10 + digest[0] % 90}" if is_last else f"{LETTERS[digest[0] % 26]}{digest[1] % 10}"
