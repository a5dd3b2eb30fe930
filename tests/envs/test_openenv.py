"""Environments behind OpenEnv's protocol, played against a small server that speaks it.

With RILL_OPENENV_PYTHON naming an interpreter that has openenv-core, the slow test plays OpenEnv's own server with the
environment that its `openenv init` writes.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rill.envs.openenv import OpenEnvEnvironment, OpenEnvGame
from rill.inference.base import Completion
from rill.types import Failure
from tests.envs.scripted import Scripted, environment, play

server = pytest.importorskip("websockets.sync.server")


def count_down(connection: Any) -> None:
    """Whoever counts down from 2 wins; "crash" fails, and an action needs a number."""
    left = 2
    for raw in connection:
        asked = json.loads(raw)
        if asked["type"] == "close":
            return
        data: dict[str, Any]
        if asked["type"] == "reset":
            data = {
                "observation": {"text": "2?", "seed": asked["data"]["seed"]},
                "reward": None,
                "done": False,
            }
        elif asked["data"].get("say") == "crash":
            answer = {"type": "error", "data": {"message": "boom", "code": "EXECUTION_ERROR"}}
            connection.send(json.dumps(answer))
            continue
        elif not str(asked["data"].get("say")).strip().isdigit():
            answer = {"type": "error", "data": {"message": "a number", "code": "VALIDATION_ERROR"}}
            connection.send(json.dumps(answer))
            continue
        else:
            left -= int(asked["data"]["say"]) == left
            data = {"observation": {"text": f"{left}?"}, "reward": float(left == 0), "done": left == 0}
        connection.send(json.dumps({"type": "observation", "data": data}))


@pytest.fixture
def url() -> Iterator[str]:
    with server.serve(count_down, "127.0.0.1", 0) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.socket.getsockname()[1]}"


async def test_a_session_is_an_episode_with_a_reward_by_step(url: str) -> None:
    env = environment("openenv", url=url, action="say", observation="text")
    episode = await play(env, Scripted("2", "one", "1"))
    assert episode.failure is None and episode.reward == 1.0 and episode.metrics["turns"] == 3
    said = [turn.text for turn in episode.samples[0].turns[1:]]
    assert said == ["2", "1?", "one", "That is no action: a number", "1"]


@pytest.mark.parametrize("nothing", ["hm", '{"a": ' + "[" * 50_000 + "}"], ids=["words", "brackets"])
async def test_answers_may_be_the_action_as_json(url: str, nothing: str) -> None:
    env = environment("openenv", url=url, observation="text", invalid_reward=-1.0)
    episode = await play(env, Scripted(nothing, 'I say {"say": "2"}', '{"say": 1}'))
    assert episode.failure is None and episode.reward == 0.0, (
        "1 for the game, -1 for an answer without an action"
    )


async def test_what_fails_behind_the_protocol_is_told(url: str) -> None:
    wanted = {
        "boom": ({"url": url, "action": "say", "observation": "text"}, "crash"),
        "has no field 'x'": ({"url": url, "observation": "x"}, "2"),
        "no OpenEnv server at": ({"url": "http://127.0.0.1:9"}, "2"),
    }
    for message, (settings, reply) in wanted.items():
        episode = await play(environment("openenv", **settings), Scripted(reply))
        assert episode.failure is Failure.ENVIRONMENT and message in str(episode.error)


async def test_a_server_without_a_free_place_is_told_of_although_it_closes_at_once() -> None:
    def full(connection: Any) -> None:
        data = {"message": "full", "code": "CAPACITY_REACHED", "max_sessions": 1}
        connection.send(json.dumps({"type": "error", "data": data}))

    with server.serve(full, "127.0.0.1", 0) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{serving.socket.getsockname()[1]}"
        game = OpenEnvGame(OpenEnvEnvironment.Config(url=url))
        connect = game._connect

        def late(*args: Any, **options: Any) -> Any:
            connection = connect(*args, **options)
            time.sleep(0.5)  # the server has closed it
            return connection

        game._connect = late
        with pytest.raises(RuntimeError, match="raise its max_concurrent_envs"):
            game.start(0)
        game.close()


def test_an_episode_that_ends_while_its_server_is_reached_leaves_no_session_there() -> None:
    ended, reaching, may_reach = (threading.Event() for _ in range(3))

    def listens(connection: Any) -> None:
        for _ in connection:
            pass
        ended.set()

    with server.serve(listens, "127.0.0.1", 0) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{serving.socket.getsockname()[1]}"
        game = OpenEnvGame(OpenEnvEnvironment.Config(url=url))
        connect = game._connect

        def late(*args: Any, **options: Any) -> Any:
            reaching.set()
            assert may_reach.wait(30)
            return connect(*args, **options)

        def start() -> None:
            with pytest.raises(ConnectionError, match="the episode is over"):
                game.start(0)

        game._connect = late
        starting = threading.Thread(target=start)
        starting.start()
        assert reaching.wait(30)
        game.close()
        may_reach.set()
        starting.join(30)
        assert ended.wait(30)


REAL = os.environ.get("RILL_OPENENV_PYTHON", "")


class Slow(Scripted):
    """So slow that two episodes meet."""

    async def generate(self, *args: Any, **options: Any) -> Completion:
        await asyncio.sleep(1.0)
        return await super().generate(*args, **options)


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[str]:
    """OpenEnv's echo environment, which has one place: 0.1 for every character."""
    bin_ = Path(REAL).parent
    subprocess.run([bin_ / "openenv", "init", "echo_lab", "-o", tmp_path], check=True, timeout=300)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [REAL, "-m", "uvicorn", "server.app:app", "--port", str(port)]
    serving = subprocess.Popen(command, cwd=tmp_path / "echo_lab")
    try:
        until_s = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert serving.poll() is None and time.monotonic() < until_s, "the server does not start"
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        serving.terminate()
        serving.wait(30)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not REAL, reason="RILL_OPENENV_PYTHON names no interpreter with openenv-core")
async def test_openenvs_own_server_plays_and_says_when_it_is_full(echo: str) -> None:
    settings = {"url": echo, "observation": "echoed_message", "max_turns": 3}
    episode = await play(environment("openenv", **settings, action="message"), Scripted("ab", "abcd", "a"))
    assert episode.failure is None and episode.reward == pytest.approx(0.7)
    said = [turn.text for turn in episode.samples[0].turns[1:]]
    assert said == ["ab", "ab", "abcd", "abcd", "a"] and episode.samples[0].is_truncated
    wrong = await play(environment("openenv", **settings), Scripted('{"text": 1}', '{"message": "abc"}', "x"))
    assert wrong.failure is None and wrong.reward == pytest.approx(0.3), "what it refuses, it is asked again"
    env = environment("openenv", **settings, action="message")
    both = await asyncio.gather(*(play(env, Slow("a", "b", "c")) for _ in range(2)))
    assert sorted(str(one.error).count("max_concurrent_envs") for one in both) == [0, 1], [
        one.error for one in both
    ]
