"""Agents behind HTTP: a program that speaks OpenAI's or Anthropic's API is trained without a change, through
`agent.base_url`.

    program ── POST {base_url}/chat/completions │ responses │ messages ──▶ agent.say() ──▶ the agent's tree ──▶ samples

One small server to an event loop, started when the first agent is asked for its address. An address belongs to one
agent of one episode and ends with it. Conversations are found again by their messages (tokens.py), so a client may send
them in any canonical form, branch, and run calls beside one another; what was sampled is never encoded again.

An answer is known when the policy has ended it: a stream sends it in one piece. A client that waits long for a stream
is sent comments, so that its connection lives.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from rill.data.dialects import ANTHROPIC, CHAT, RESPONSES, Answer, AnswerStream, Dialect
from rill.envs.agent import Agent, EpisodeOver, TurnTimeout
from rill.envs.per_loop import PerLoop
from rill.envs.reply import Reply
from rill.errors import RunError, UserError
from rill.types import StopReason

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

HOST = "127.0.0.1"
REFUSED = ("functions", "function_call", "response_format", "logit_bias", "top_logprobs")
"""Fields that would change the answer and cannot be honoured."""
Body = list[dict[str, Any]]
"""Messages, or tools, as chat has them."""
PATIENCE_S = 10.0
"""How long a client hears nothing of a stream. Until then, what goes wrong is an HTTP status, which clients know."""


@dataclass(slots=True)
class _Session:
    agent: Agent
    responses: dict[str, Body] = field(default_factory=dict)
    """Conversations by the id of the response that ended them: Responses clients may name one as their past."""


class _Refusal(Exception):
    """An answer other than success."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class Server:
    """Of one event loop; lives as long as it does."""

    def __init__(self) -> None:
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        self._sessions: dict[str, _Session] = {}
        self._socket = socket.create_server((HOST, 0), backlog=1024)
        home = "/sessions/{key}/v1"
        routes = [
            Route(f"{home}{dialect.path}", partial(self.answer, dialect), methods=["POST"])
            for dialect in (CHAT, RESPONSES, ANTHROPIC)
        ]
        # Anthropic's clients add the /v1 themselves.
        routes.append(Route(f"{home}/v1{ANTHROPIC.path}", partial(self.answer, ANTHROPIC), methods=["POST"]))
        routes.append(Route(f"{home}/models", self.models, methods=["GET"]))
        config = uvicorn.Config(Starlette(routes=routes), log_level="error", lifespan="off", access_log=False)
        server = uvicorn.Server(config)
        server.config.load()
        self._serving = asyncio.ensure_future(_serve(server, self._socket))

    def open(self, agent: Agent) -> str:
        """The agent's address."""
        key = secrets.token_urlsafe(16)
        self._sessions[key] = _Session(agent)
        return f"http://{HOST}:{self._socket.getsockname()[1]}/sessions/{key}/v1"

    def close(self, base_url: str) -> None:
        del self._sessions[base_url.split("/")[-2]]

    async def models(self, request: Request) -> Response:
        session = self._sessions.get(request.path_params["key"])
        if session is None:
            return _json(CHAT.error("this episode is over", "session_not_found"), 404)
        model = {"id": session.agent.name, "object": "model", "created": 0, "owned_by": "rill"}
        return _json({"object": "list", "data": [model]})

    async def answer(self, dialect: Dialect, request: Request) -> Response:
        session = self._sessions.get(request.path_params["key"])
        if session is None:
            return _json(dialect.error("this episode is over", "session_not_found"), 404)
        try:
            body = msgspec.json.decode(await request.body())
            past = _past(session, body) if dialect is RESPONSES else []
            chat = dialect.to_chat(body)
            messages, tools, sampling = read_body(chat)
            shows_usage = bool((chat.get("stream_options") or {}).get("include_usage"))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            return _json(
                dialect.error(f"the request cannot be read: {error}", "invalid_request_error"), status=400
            )
        agents = session.agent.setting.agents
        if agents is None:  # it ended while the request was on its way
            return _json(dialect.error("this episode is over", "session_not_found"), 404)
        agent = agents.routed(str(chat.get("model") or ""), request.headers) or session.agent
        if past:
            start = int(bool(body.get("instructions")))
            messages[start:start] = past
        kept = session.responses if dialect is RESPONSES else None
        answer = _say(agent, messages, tools, sampling, kept)
        try:
            if not chat.get("stream"):
                return _json(dialect.whole(await answer))
            said = asyncio.ensure_future(answer)
            await asyncio.wait({said}, timeout=PATIENCE_S)
            if said.done():
                said.result()
        except _Refusal as refusal:
            return _json(dialect.error(refusal.message, refusal.code), refusal.status)
        from starlette.responses import StreamingResponse

        stream_of = partial(dialect.stream, shows_usage=shows_usage)
        return StreamingResponse(_events(stream_of, agent, said), media_type="text/event-stream")


servers = PerLoop(Server)


def _past(session: _Session, body: dict[str, Any]) -> Body:
    """The conversation that `previous_response_id` names."""
    name = body.pop("previous_response_id", None)
    if name is None:
        return []
    if name not in session.responses:
        raise ValueError(f"previous_response_id: there is no response {name!r} in this episode")
    return session.responses[name]


async def _say(
    agent: Agent, messages: Body, tools: Body, sampling: dict[str, Any], kept: dict[str, Body] | None
) -> Answer:
    """Raises _Refusal. `kept` gets the conversation, by the answer's id."""
    try:
        reply = await agent.say(messages, tools, **sampling)
    except EpisodeOver as over:
        agent.setting.counts.is_cut_off = True
        raise _Refusal(400, f"the episode's budget is used up: {over}", "context_length_exceeded") from None
    except TurnTimeout as late:
        raise _Refusal(504, str(late), "timeout") from None
    except UserError as error:
        raise _Refusal(400, str(error), "invalid_request_error") from None
    except (asyncio.CancelledError, RunError):  # put back, or a failed engine
        raise _Refusal(503, "the episode was interrupted", "interrupted") from None
    answer = as_answer(agent.name, reply)
    if kept is not None:
        said = {"role": "assistant", "content": reply.text, "tool_calls": list(answer.calls)}
        past = [message for message in messages if message.get("role") not in ("system", "developer")]
        kept[f"resp_{answer.id}"] = [*past, said]
    return answer


async def _events(
    stream_of: Callable[[Answer], AnswerStream], agent: Agent, said: asyncio.Future[Answer]
) -> AsyncIterator[bytes]:
    while not said.done():
        yield b": the answer is on its way\n\n"
        await asyncio.wait({said}, timeout=PATIENCE_S)
    try:
        answer = said.result()
    except _Refusal as refusal:
        unsaid = Answer(id=secrets.token_hex(8), model=agent.name, created=int(time.time()))
        yield stream_of(unsaid).error(refusal.message, refusal.code)
        return
    stream = stream_of(answer)
    yield stream.begin() + stream.feed(answer.content, answer.calls) + stream.end(answer)


async def _serve(server: Any, listening: socket.socket) -> None:
    """uvicorn's own serve() takes the process's signals; this server is a guest in the process."""
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup(sockets=[listening])
    await server.main_loop()


def read_body(body: Mapping[str, Any]) -> tuple[Body, Body, dict[str, Any]]:
    """(messages, tools, what differs from the run's sampling) of a chat body. Raises ValueError for what cannot be
    honoured. Temperature and the like are the run's: they are not read."""
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
        if sampling["max_new_tokens"] < 1:
            raise ValueError(f"max_tokens: at least 1, not {limit}")
    if (stop := body.get("stop")) is not None:
        sampling["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(each, str) for each in sampling["stop"]):
            raise ValueError("stop: text, or a list of texts")
    tools = [] if body.get("tool_choice") == "none" else list(body.get("tools") or ())
    return list(messages), tools, sampling


def as_answer(model: str, reply: Reply) -> Answer:
    calls = tuple(dict(call) for call in reply.message.tool_calls)
    reason = "length" if reply.stop_reason is StopReason.LENGTH else "tool_calls" if calls else "stop"
    return Answer(
        id=reply.node.digest,
        model=model,
        created=int(time.time()),
        content=reply.text,
        calls=calls,
        finish_reason=reason,
        num_prompt_tokens=len(reply.prompt_ids),
        num_completion_tokens=len(reply.token_ids),
    )


def _json(content: dict[str, Any], status: int = 200) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(content, status_code=status)
