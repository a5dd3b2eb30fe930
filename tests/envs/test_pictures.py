"""Pictures in conversations: where they stand among the tokens, and what tells two conversations apart."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from rill.data.pictures import read_parts
from rill.envs.agent import Agents
from rill.errors import DataError
from rill.models.loading import load_tokenizer
from rill.models.pictures import load_pictures
from rill.types import PICTURE, Message, Prompt
from tests.envs.scripted import Scripted, play, playing
from tests.models.tiny_vision import PLACEHOLDER, noise, tiny

MODEL = tiny("qwen2_5_vl")
ONE, OTHER = noise(16, 16), noise(16, 24, seed=1)
TASK = Prompt(id="p", messages=(Message(role="user", content=f"a{PICTURE}b", pictures=(ONE,)),))


async def test_pictures_of_every_turn_stand_where_their_placeholders_do() -> None:
    """The first in the task, the second in what a client says later, as the OpenAI API has it."""
    url = f"data:image/png;base64,{base64.b64encode(OTHER).decode()}"
    later = {
        "role": "user",
        "content": [{"type": "text", "text": "and?"}, {"type": "image_url", "image_url": {"url": url}}],
    }

    async def run(task: Prompt, agents: Agents) -> float:
        reply = await agents.policy.say(task.messages)
        await agents.policy.say([*task.messages, reply.message, later])
        return 1.0

    tokenizer = load_tokenizer(MODEL)
    environment = playing(run, tokenizer)
    environment.encoder.pictures = load_pictures(MODEL)
    policy = Scripted("x", "y", tokenizer=tokenizer)
    episode = await play(environment, policy, TASK)
    assert episode.error is None
    (sample,) = episode.samples
    assert [picture.data for picture in sample.pictures] == [ONE, OTHER]
    covered = np.zeros(sample.num_tokens, dtype=np.bool_)
    for picture in sample.pictures:
        covered[picture.start : picture.end] = True
    assert (covered == (sample.token_ids == PLACEHOLDER)).all()
    assert [len(pictures) for pictures in policy.pictures] == [1, 2]


async def test_the_same_words_with_another_picture_are_another_request() -> None:
    async def run(task: Prompt, agents: Agents) -> float:
        for file in (ONE, noise(16, 16, seed=9)):
            asked = Message(role="user", content=PICTURE, pictures=(file,))
            await agents.policy.generate(Prompt(id="q", messages=(asked,)))
            await agents.policy.say([asked])
        return 1.0

    tokenizer = load_tokenizer(MODEL)
    environment = playing(run, tokenizer)
    environment.encoder.pictures = load_pictures(MODEL)
    policy = Scripted("x", "x", "x", "x", tokenizer=tokenizer)
    episode = await play(environment, policy, TASK)
    assert episode.error is None
    assert len({tuple(ids) for ids in policy.seen}) == 1
    assert len({name.partition("~")[0] for name in policy.names}) == 2


async def test_a_model_that_reads_no_pictures_refuses_them() -> None:
    async def run(task: Prompt, agents: Agents) -> float:
        await agents.policy.say(task.messages)
        return 1.0

    with pytest.raises(DataError, match="reads text alone"):
        await play(playing(run), Scripted("x"), TASK)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "image_url", "image_url": {"url": "data:image/png,plain"}},
        {"type": "text"},
    ],
)
def test_parts_that_cannot_be_shown_are_refused(part: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        read_parts([part])
