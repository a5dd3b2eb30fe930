"""Agents behind HTTP: a program that speaks OpenAI's chat API is trained without a change, through `agent.base_url`.

    program ── POST {base_url}/chat/completions ──▶ agent.say() ──▶ the agent's tree ──▶ samples

One small server to an event loop, started when the first agent is asked for its address. An address belongs to one
agent of one episode and ends with it. Conversations are found again by their messages (tokens.py), so a client may send
them in any canonical form, branch, and run calls beside one another; what was sampled is never encoded again.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from rill.envs.agent import Agent, EpisodeOver, TurnTimeout
from rill.envs.reply import Reply
from rill.envs.rewards.per_loop import PerLoop
from rill.errors import RunError, UserError
from rill.types import StopReason

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

HOST = "127.0.0.1"
REFUSED = ("functions", "function_call", "response_format", "logit_bias", "top_logprobs")
"""Fields that would change the answer and cannot be honoured."""


class HttpEndpoint:
    """rill.envs.base.Endpoint for any number of event loops."""

    def __init__(self) -> None:
        self._servers = PerLoop(_Server)

    def open(self, agent: Agent) -> str:
        return self._servers().open(agent)

    def close(self, agent: Agent) -> None:
        self._servers().close(agent)


class _Server:
    """Of one event loop; lives as long as it does."""

    def __init__(self) -> None:
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        self._agents: dict[str, Agent] = {}
        self._socket = socket.create_server((HOST, 0), backlog=1024)
        app = Starlette(
            routes=[
                Route("/sessions/{key}/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/sessions/{key}/v1/models", self.models, methods=["GET"]),
            ]
        )
        config = uvicorn.Config(app, log_level="error", lifespan="off", access_log=False)
        server = uvicorn.Server(config)
        server.config.load()
        self._serving = asyncio.ensure_future(_serve(server, self._socket))

    def open(self, agent: Agent) -> str:
        key = secrets.token_urlsafe(16)
        self._agents[key] = agent
        return f"http://{HOST}:{self._socket.getsockname()[1]}/sessions/{key}/v1"

    def close(self, agent: Agent) -> None:
        for key in [key for key, known in self._agents.items() if known is agent]:
            del self._agents[key]

    async def models(self, request: Request) -> Response:
        agent = self._agents.get(request.path_params["key"])
        if agent is None:
            return _error(404, "this episode is over", "session_not_found")
        return _json({"object": "list", "data": [{"id": agent.name, "object": "model", "owned_by": "rill"}]})

    async def chat(self, request: Request) -> Response:
        agent = self._agents.get(request.path_params["key"])
        if agent is None:
            return _error(404, "this episode is over", "session_not_found")
        try:
            body = json.loads(await request.body())
            messages, tools, sampling = read_body(body)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return _error(400, f"the request cannot be read: {error}", "invalid_request_error")
        try:
            reply = await agent.say(messages, tools, **sampling)
        except EpisodeOver as over:
            agent.setting.counts.is_cut_off = True
            return _error(400, f"the episode's budget is used up: {over}", "context_length_exceeded")
        except TurnTimeout as late:
            return _error(504, str(late), "timeout")
        except UserError as error:
            return _error(400, str(error), "invalid_request_error")
        except (asyncio.CancelledError, RunError) as error:  # put back, or a failed engine
            agent.setting.interrupt(error)
            return _error(503, "the episode was interrupted", "interrupted")
        answer = as_completion(agent.name, reply)
        if not body.get("stream"):
            return _json(answer)
        from starlette.responses import StreamingResponse

        return StreamingResponse(_chunks(answer), media_type="text/event-stream")


async def _serve(server: Any, listening: socket.socket) -> None:
    """uvicorn's own serve() takes the process's signals; this server is a guest in the process."""
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup(sockets=[listening])
    await server.main_loop()


def read_body(body: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Messages, tools and what differs from the run's sampling. Raises ValueError for what cannot be honoured."""
    wrong = [name for name in REFUSED if body.get(name) not in (None, {"type": "text"}, {}, 0)]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: not supported by this agent")
    if body.get("n") not in (None, 1):
        raise ValueError("n: one answer at a time; ask again for another")
    messages = body["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages: a list that is not empty")
    sampling: dict[str, Any] = {}
    if (limit := body.get("max_completion_tokens") or body.get("max_tokens")) is not None:
        sampling["max_new_tokens"] = int(limit)
    if (stop := body.get("stop")) is not None:
        sampling["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    tools = body.get("tools") or []
    return messages, [] if body.get("tool_choice") == "none" else tools, sampling


def as_completion(model: str, reply: Reply) -> dict[str, Any]:
    """As OpenAI has it, with the token ids and log-probabilities of the answer."""
    calls = [dict(call) for call in reply.message.tool_calls]
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or (None if calls else "")}
    if calls:
        message["tool_calls"] = calls
    reason = "length" if reply.stop_reason is StopReason.LENGTH else "tool_calls" if calls else "stop"
    num_prompt, num_said = len(reply.prompt_ids), len(reply.token_ids)
    return {
        "id": f"chatcmpl-{reply.node.digest}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_said,
            "total_tokens": num_prompt + num_said,
        },
    }


async def _chunks(answer: dict[str, Any]) -> AsyncIterator[str]:
    """The whole answer as a stream of one piece: it is known only when it has ended."""
    choice = answer["choices"][0]
    message = dict(choice["message"])
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": n, **call} for n, call in enumerate(message["tool_calls"])]
    common = {**answer, "object": "chat.completion.chunk"}
    del common["usage"]
    for delta, reason in ((message, None), ({}, choice["finish_reason"])):
        chunk = {**common, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


def _json(content: dict[str, Any], status: int = 200) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(content, status_code=status)


def _error(status: int, message: str, code: str) -> Response:
    return _json({"error": {"message": message, "type": code, "code": code}}, status)
