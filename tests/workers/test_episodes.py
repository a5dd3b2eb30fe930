"""What becomes of a group whose last episode has ended, in the process where it was made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rill.envs.agent import Agents
from rill.errors import JournalError
from rill.inference.base import Completion, Request
from rill.inference.policy import PolicyClient, answered
from rill.models.loading import load_tokenizer
from rill.types import Prompt, Sample, StopReason
from rill.workers.episodes import Episodes
from rill.workers.records import Outcome, Task
from rill.workflows.grpo import GRPO, finish_group
from rill.workflows.language import episode_settings
from tests.workflows.scene import MODEL

TOKENIZER = load_tokenizer(MODEL)


class Engine:
    """Says of every request what `text` makes of it."""

    def __init__(self, text: Callable[[Request], str]) -> None:
        self._text = text

    def submit(self, requests: Sequence[Request], epoch: int) -> list[Future[Completion]]:
        return [answered(self._completion(request)) for request in requests]

    def _completion(self, request: Request) -> Completion:
        ids = TOKENIZER.encode(self._text(request), add_special_tokens=False)
        return Completion(
            request_id=request.id,
            token_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -1.0, np.float32),
            versions=np.ones(len(ids), np.int32),
            stop_reason=StopReason.EOS,
        )


async def finished(
    folder: Path,
    run: Callable[..., Any],
    text: Callable[[Request], str],
    *,
    group_size: int = 2,
    **algorithm: Any,
) -> tuple[Outcome, dict[str, Sample]]:
    """The outcome of one group, and its samples by name."""
    environment = {"type": "function", "function": f"{__name__}:{run.__name__}"}
    config = GRPO.Config.model_validate(
        {
            "model": MODEL,
            "data": {"type": "arithmetic"},
            "algorithm": algorithm,
            "trainer": {},
            "rollout": {"env": environment, "group_size": group_size},
            "journal": {"enabled": False},
        }
    )
    episodes = Episodes(episode_settings(config, finish_group, str(folder)), "rollout-0", None)
    policy = PolicyClient(Engine(text), seed=0, decode=TOKENIZER.decode)
    try:
        task = Task(index=0, prompt=Prompt(id="p", text="1+1="), num_samples=group_size)
        outcome, samples = await episodes.group(task, policy)
    finally:
        episodes.close()
    return outcome, {sample.id.removeprefix("g00000000/"): sample for sample in samples}


async def shown_then_broken(task: Prompt, agents: Agents) -> float:
    """A turn that is shown, one that is trained on; an answer of "!" breaks the episode."""
    shown = await agents.policy.generate(task, is_trained=False)
    said = await agents.policy.generate(shown.then("so"))
    if said.text == "!":
        raise ValueError("broken")
    return float(len(said.text))


async def test_failed_episodes_are_trained_on_where_asked_without_the_turns_that_others_are_not(
    tmp_path: Path,
) -> None:
    def text(request: Request) -> str:
        return "!" if request.id.startswith("g00000000/1") else "ab"

    outcome, samples = await finished(
        tmp_path, shown_then_broken, text, type="rloo", filters={"train_failed": True}
    )
    assert outcome.is_kept
    said = {
        name: TOKENIZER.decode(s.trajectory.token_ids[s.trajectory.loss_mask]) for name, s in samples.items()
    }
    assert said == {"0": "ab", "1": "!"}
    assert samples["1"].advantages[-1] == -2.0


def greedily(request: Request, said: str, otherwise: str) -> str:
    return said if request.id.startswith("g00000000/greedy") else otherwise


async def test_a_greedy_answer_that_failed_is_no_baseline(tmp_path: Path) -> None:
    def text(request: Request) -> str:
        return greedily(request, "!", "ab")

    outcome, samples = await finished(tmp_path, shown_then_broken, text, type="remax")
    assert (outcome.dropped, samples) == ("failed", {})
    asked = {"type": "remax", "filters": {"train_failed": True}}
    outcome, samples = await finished(tmp_path, shown_then_broken, text, **asked)
    assert outcome.is_kept and samples["0"].advantages[-1] == 2.0, "against the reward that it carries"


async def seller_and_buyer(task: Prompt, agents: Agents) -> None:
    for name in ("seller", "buyer"):
        said = await agents[name].generate(task)
        agents[name].reward(len(said.text))


async def test_each_agent_is_compared_with_its_own_reward_in_the_greedy_episode(tmp_path: Path) -> None:
    def text(request: Request) -> str:
        return greedily(request, "abcd" if "#buyer" in request.id else "a", "abc")

    _, samples = await finished(tmp_path, seller_and_buyer, text, type="remax")
    found = {name: float(sample.advantages[-1]) for name, sample in samples.items()}
    assert found == {"0:seller": 2.0, "0:buyer": -1.0, "1:seller": 2.0, "1:buyer": -1.0}


async def won_by_who_says_more(task: Prompt, agents: Agents) -> None:
    """The loser is asked once more, behind another history: a sample of its own."""
    said = {name: await agents[name].generate(task) for name in ("policy", "other")}
    winner, loser = sorted(said, key=lambda name: -len(said[name].text))
    agents[winner].reward(1.0)
    agents[loser].reward(0.0)
    await agents[loser].generate([5, 6, 7])


async def test_a_curriculum_is_told_how_the_first_agent_did_and_of_every_episode_once(tmp_path: Path) -> None:
    """Of a game for two the mean over all samples says nothing, whoever wins."""

    def text(request: Request) -> str:
        is_strong = "#policy" in request.id and not request.id.startswith("g00000000/3")
        return "abc" if is_strong else "ab" if "#other" in request.id else "a"

    outcome, _ = await finished(tmp_path, won_by_who_says_more, text, group_size=4)
    assert outcome.rewards == (1.0, 1.0, 1.0, 0.0)


async def cancels_itself(task: Prompt, agents: Agents) -> float:
    said = await agents.policy.generate(task)
    if said.text == "!":
        raise asyncio.CancelledError("by a client of the environment's")
    return float(len(said.text))


async def test_an_episode_that_cancels_itself_has_failed_and_its_group_is_not_put_back(
    tmp_path: Path,
) -> None:
    """As one that was stopped it would be taken up again, and cancel itself again."""

    def text(request: Request) -> str:
        return "!" * request.id.startswith("g00000000/1") or "ab" + "c" * request.id.startswith("g00000000/2")

    outcome, samples = await finished(tmp_path, cancels_itself, text, group_size=3, type="rloo")
    assert outcome.stopped is None and outcome.is_kept
    assert (
        "cancel" in str(samples["1"].trajectory.error).lower() and not samples["1"].trajectory.loss_mask.any()
    )


class Tasks:
    """A channel of tasks, each in a lease."""

    def __init__(self, *tasks: Task) -> None:
        self._tasks = tasks

    def of_epoch(self, number: int) -> Tasks:
        return self

    async def leases(self) -> AsyncIterator[Any]:
        for task in self._tasks:
            yield SimpleNamespace(value=task)


async def test_what_ends_the_episodes_is_told_as_it_is(tmp_path: Path) -> None:
    """Not as a group of errors: who waits looks at the error, and its first line is what people see."""

    def broken(request: Request) -> str:
        raise JournalError("the token log cannot be written: make room")

    config = GRPO.Config.model_validate(
        {
            "model": MODEL,
            "data": {"type": "arithmetic"},
            "algorithm": {},
            "trainer": {},
            "rollout": {"env": {"type": "function", "function": f"{__name__}:shown_then_broken"}},
            "journal": {"enabled": False},
        }
    )
    episodes = Episodes(episode_settings(config, finish_group, str(tmp_path)), "rollout-0", None)
    tasks = [Task(index=i, prompt=Prompt(id="p", text="1+1="), num_samples=1) for i in range(3)]
    flows: Any = SimpleNamespace(tasks=Tasks(*tasks))
    try:
        with pytest.raises(JournalError, match="make room"):
            await episodes.run(flows, Engine(broken), Engine(broken), 0)
    finally:
        episodes.close()
