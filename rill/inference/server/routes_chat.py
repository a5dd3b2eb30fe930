"""POST /v1/chat/completions, and its twin for prompts that are token ids already (verifiers' classic route)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from starlette.responses import Response

from rill.inference.base import Feature, Guide
from rill.inference.base import Request as EngineRequest
from rill.inference.server.answers import OpenAIAnswer, finish_reason, logprob_entries, respond
from rill.inference.server.errors import bad_request
from rill.inference.server.generation import Piece, Samples
from rill.inference.server.http import Access, Call, Routes
from rill.inference.server.reasoning import CLOSE, OPEN, ReasoningStream
from rill.inference.server.sampling import build_requests
from rill.inference.server.schemas import ChatBody, ChatTokensBody, NamedTool
from rill.inference.server.state import ServerState
from rill.inference.server.text import TextStream, encode_chat
from rill.inference.server.tool_calls import ToolCallStream, forced_call
from rill.types import Picture

routes = Routes()


@routes.post("/v1/chat/completions", Access.CLIENT)
async def create_chat_completion(call: Call, body: ChatBody) -> Response:
    return await respond(call, ChatAnswer(call.state, body, *await encode_chat(call.state.codec, body)))


@routes.post("/v1/chat/completions/tokens", Access.CLIENT)
async def create_chat_completion_from_tokens(call: Call, body: ChatTokensBody) -> Response:
    return await respond(call, ChatAnswer(call.state, body, body.tokens))


class Said(NamedTuple):
    """What came with a piece."""

    reasoning: str
    content: str
    calls: list[dict[str, Any]]
    finish_reason: str | None


class _Sample:
    """The text of one choice: what is reasoning, what is content, and which calls stand in it."""

    def __init__(
        self, state: ServerState, body: ChatBody, prompt: list[int], *, has_tools: bool, is_reasoning: bool
    ) -> None:
        syntax = state.tool_syntax
        markers = (*syntax.markers, OPEN, CLOSE) if has_tools else (OPEN, CLOSE)
        has_marks = has_tools or state.has_reasoning
        kept = state.codec.special_ids_of(markers) if has_marks else frozenset()
        self._text = TextStream(state.codec, body, kept, before=prompt if body.continue_final_message else ())
        self._reasoning = ReasoningStream(is_open=is_reasoning) if state.has_reasoning else None
        parallel = body.parallel_tool_calls
        self._tools = ToolCallStream(syntax, body.tools or [], parallel=parallel) if has_tools else None

    def feed(self, piece: Piece, *, in_parts: bool) -> Said:
        """With the calls that are complete, or `in_parts`, as they are written."""
        is_last, reason = piece.completion is not None, finish_reason(piece.completion)
        reasoning, text = "", self._text.hear(piece)
        if self._reasoning is not None:
            reasoning, text = self._reasoning.feed(text, is_last=is_last)
        if self._tools is None:
            return Said(reasoning, text, [], reason)
        if in_parts:
            content, calls = self._tools.stream(text, is_last=is_last)
        else:
            content, parsed = self._tools.feed(text, is_last=is_last)
            calls = [call.as_json() for call in parsed]
        has_called = reason == "stop" and self._tools.calls
        return Said(reasoning, content, calls, "tool_calls" if has_called else reason)


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
        self.writes_tokens |= body.logprobs
        self._prompt, self._pictures = prompt, pictures
        has_tools = bool(body.tools) and body.tool_choice != "none"
        end = state.codec.decode(prompt[-8:], skip_special_tokens=False) if state.has_reasoning else ""
        self._is_reasoning = end.rstrip().endswith(OPEN)
        """The prompt ends inside of a block, and the answer may go on with it."""
        self._samples: defaultdict[int, _Sample] = defaultdict(
            lambda: _Sample(state, body, prompt, has_tools=has_tools, is_reasoning=self._is_reasoning)
        )
        """Those that have begun."""

    def limit(self) -> tuple[str, int | None]:
        """How many tokens at most, and by which name that was asked for."""
        if self.body.max_completion_tokens is None:
            return "max_tokens", self.body.max_tokens
        return "max_completion_tokens", self.body.max_completion_tokens

    def requests(self) -> list[EngineRequest]:
        body = self.body
        limit_param, max_tokens = self.limit()
        requests = build_requests(
            self.state,
            body,
            self.prompts,
            request_id=self.id,
            max_tokens=max_tokens,
            limit_param=limit_param,
            num_top=body.top_logprobs,
            top_param="top_logprobs",
            guide=self._forced_call(),
            pictures=self._pictures,
            is_streamed=self.is_streamed,
        )
        self._is_reasoning &= requests[0].guide is None  # a grammar holds from the first token
        return requests

    def _forced_call(self) -> Guide | None:
        choice = self.body.tool_choice
        if choice in (None, "none", "auto"):
            return None
        self.state.require(Feature.GUIDED, "tool_choice", "this engine cannot force a call")
        name = choice.function.name if isinstance(choice, NamedTool) else None
        return forced_call(self.state.tool_syntax, self.body.tools or [], name)

    async def whole(self, samples: Samples) -> dict[str, Any]:
        choices = []
        for piece, lists in await self.wholes(samples):
            said = self.hear(piece)
            message = {"role": "assistant", "content": said.content or (None if said.calls else "")}
            choices.append(self._choice(piece, lists, said, "message", message))
        answer = self.envelope(choices, is_chunk=False) | self.usage(samples)
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = self._prompt
        return answer

    def chunk(self, piece: Piece) -> dict[str, Any]:
        is_first, is_started = not self._samples, piece.index in self._samples
        said = self.hear(piece, in_parts=True)
        delta: dict[str, Any] = {} if is_started else {"role": "assistant"}
        if said.content or not is_started:
            delta["content"] = said.content
        chunk = self.envelope([self._choice(piece, self.lists(piece), said, "delta", delta)], is_chunk=True)
        if is_first and self.body.return_token_ids:
            chunk["prompt_token_ids"] = self._prompt
        return chunk

    def hear(self, piece: Piece, *, in_parts: bool = False) -> Said:
        return self._samples[piece.index].feed(piece, in_parts=in_parts)

    def lists(self, piece: Piece) -> dict[str, Any]:
        if not self.body.logprobs:
            return super().lists(piece)
        as_ids = self.body.return_tokens_as_token_ids
        return super().lists(piece) | {"content": logprob_entries(self.state.codec, piece, as_ids=as_ids)}

    def _choice(
        self, piece: Piece, lists: dict[str, Any], said: Said, kind: str, message: dict[str, Any]
    ) -> dict[str, Any]:
        """`kind`: what the message is called, a delta or a whole one."""
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message["tool_calls"] = said.calls
        choice = self.choice(piece, lists) | {"finish_reason": said.finish_reason, kind: message}
        if self.body.logprobs:
            choice["logprobs"] = {"content": lists["content"], "refusal": None}
        return choice
