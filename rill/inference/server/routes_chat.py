"""POST /v1/chat/completions, and its twin for prompts that are token ids already (verifiers' classic route)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from rill.data.tool_calls import ParsedCall
from rill.inference.base import Feature, Guide
from rill.inference.base import Request as EngineRequest
from rill.inference.server.answers import OpenAIAnswer, respond
from rill.inference.server.chat import encode_chat
from rill.inference.server.choices import finish_reason, logprob_entries
from rill.inference.server.errors import bad_request
from rill.inference.server.generation import Piece, Samples
from rill.inference.server.http import Access, Call, Routes
from rill.inference.server.reasoning import CLOSE, OPEN, ReasoningStream
from rill.inference.server.sampling import build_requests, num_top_logprobs
from rill.inference.server.schemas import ChatBody, ChatTokensBody, NamedTool
from rill.inference.server.state import ServerState
from rill.inference.server.text import TextStream
from rill.inference.server.tool_calls import CallDelta, ToolCallStream, forced_call
from rill.types import Picture

routes = Routes()


@routes.post("/v1/chat/completions", Access.CLIENT)
async def create_chat_completion(call: Call, body: ChatBody) -> Response:
    return await respond(call, await chat_answer(call.state, body))


@routes.post("/v1/chat/completions/tokens", Access.CLIENT)
async def create_chat_completion_from_tokens(call: Call, body: ChatTokensBody) -> Response:
    return await respond(call, ChatAnswer(call.state, body, body.tokens))


async def chat_answer(state: ServerState, body: ChatBody) -> ChatAnswer:
    return ChatAnswer(state, body, *await encode_chat(state.codec, body))


class _Sample:
    """The text of one choice: what is reasoning, what is content, and which calls stand in it."""

    def __init__(self, state: ServerState, body: ChatBody, has_tools: bool, is_reasoning: bool) -> None:
        syntax = state.tool_syntax
        markers = (*syntax.markers, OPEN, CLOSE) if has_tools else (OPEN, CLOSE)
        has_marks = has_tools or state.has_reasoning
        kept = state.codec.special_ids_of(markers) if has_marks else frozenset()
        self._text = TextStream(state.codec, body, kept)
        self._reasoning = ReasoningStream(is_open=is_reasoning) if state.has_reasoning else None
        self._tools = (
            ToolCallStream(syntax, body.tools or [], parallel=body.parallel_tool_calls is not False)
            if has_tools
            else None
        )

    def feed(self, piece: Piece) -> tuple[str, str, list[ParsedCall]]:
        """(reasoning, content, calls that are complete) that came with it."""
        reasoning, text = self._split(piece)
        if self._tools is None:
            return reasoning, text, []
        return reasoning, *self._tools.feed(text, is_last=piece.completion is not None)

    def stream(self, piece: Piece) -> tuple[str, str, list[CallDelta]]:
        """As `feed`; calls as they are written."""
        reasoning, text = self._split(piece)
        if self._tools is None:
            return reasoning, text, []
        return reasoning, *self._tools.stream(text, is_last=piece.completion is not None)

    def finish_reason(self, piece: Piece) -> str | None:
        reason = finish_reason(piece.completion)
        return "tool_calls" if reason == "stop" and self._tools is not None and self._tools.calls else reason

    def _split(self, piece: Piece) -> tuple[str, str]:
        is_last = piece.completion is not None
        text = self._text.feed(piece.token_ids.tolist(), is_last=is_last)
        return ("", text) if self._reasoning is None else self._reasoning.feed(text, is_last=is_last)


class ChatAnswer(OpenAIAnswer):
    prefix = "chatcmpl"
    kinds = ("chat.completion", "chat.completion.chunk")

    def __init__(
        self, state: ServerState, body: ChatBody, prompt: list[int], pictures: tuple[Picture, ...] = ()
    ) -> None:
        super().__init__(state, body, [prompt])
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
        if body.tool_choice not in (None, "none") and not body.tools:
            raise bad_request("tool_choice needs tools", "tool_choice")
        self.body: ChatBody = body
        self._prompt, self._pictures = prompt, pictures
        self._has_tools = bool(body.tools) and body.tool_choice != "none"
        self._is_reasoning = state.has_reasoning and state.codec.decode(
            prompt[-8:], skip_special_tokens=False
        ).rstrip().endswith(OPEN)
        self._samples: dict[int, _Sample] = {}
        """Those that have begun."""

    def requests(self) -> list[EngineRequest]:
        body = self.body
        wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return build_requests(
            self.state,
            body,
            self.prompts,
            request_id=self.id,
            max_tokens=wanted,
            num_top=num_top_logprobs(body.top_logprobs, self.state, "top_logprobs"),
            guide=self._forced_call(),
            pictures=self._pictures,
        )

    def _forced_call(self) -> Guide | None:
        choice = self.body.tool_choice
        if choice in (None, "none", "auto"):
            return None
        self.state.require(Feature.GUIDED, "tool_choice", "this engine cannot force a call")
        name = choice.function.name if isinstance(choice, NamedTool) else None
        return forced_call(self.state.tool_syntax, self.body.tools or [], name)

    async def whole(self, samples: Samples) -> dict[str, Any]:
        choices = []
        for piece in await samples.whole():
            sample = self._sample(piece)
            reasoning, content, calls = sample.feed(piece)
            message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
            choices.append(self._choice(piece, sample, "message", message, reasoning, calls))
        answer = self.envelope(choices, is_chunk=False) | self.usage(samples)
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = self._prompt
        return answer

    def chunk(self, piece: Piece) -> dict[str, Any]:
        is_first, is_started = not self._samples, piece.index in self._samples
        sample = self._sample(piece)
        reasoning, content, calls = sample.stream(piece)
        delta: dict[str, Any] = {} if is_started else {"role": "assistant"}
        if content or not is_started:
            delta["content"] = content
        choice = self._choice(piece, sample, "delta", delta, reasoning, calls)
        chunk = self.envelope([choice], is_chunk=True)
        if is_first and self.body.return_token_ids:
            chunk["prompt_token_ids"] = self._prompt
        return chunk

    def said(self, piece: Piece) -> tuple[str, list[ParsedCall], str | None]:
        """As `chunk`, for another dialect: content, calls that are complete, and why it ended."""
        sample = self._sample(piece)
        _, content, calls = sample.feed(piece)
        return content, calls, sample.finish_reason(piece)

    def _choice(
        self,
        piece: Piece,
        sample: _Sample,
        kind: str,
        message: dict[str, Any],
        reasoning: str,
        calls: Sequence[ParsedCall | CallDelta],
    ) -> dict[str, Any]:
        """`kind`: what the message is called, a delta or a whole one."""
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [call.as_json() for call in calls]
        choice = self.choice(piece) | {"finish_reason": sample.finish_reason(piece), kind: message}
        if self.body.logprobs:
            as_ids = bool(self.body.return_tokens_as_token_ids)
            content = logprob_entries(self.state.codec, piece, as_ids=as_ids)
            choice["logprobs"] = {"content": content, "refusal": None}
        return choice

    def _sample(self, piece: Piece) -> _Sample:
        if piece.index not in self._samples:
            new = _Sample(self.state, self.body, self._has_tools, self._is_reasoning)
            self._samples[piece.index] = new
        return self._samples[piece.index]
