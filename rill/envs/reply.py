"""One answer of an agent: what it said, what may follow it, and the tools it calls.

Made by Agent. Tool calls go through here, so that each has a deadline, is counted, and is logged: a resumed episode
finds the result instead of calling again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rill.envs.events import BEGUN
from rill.envs.tokens import Node, TokenTree
from rill.envs.tools import ERROR, Tool, as_tool, run_tool
from rill.types import Floats, Message, StopReason, TokenIds

if TYPE_CHECKING:
    from rill.envs.agent import Setting


class Reply:
    def __init__(self, setting: Setting, agent: str, tree: TokenTree, node: Node, message: Message) -> None:
        assert node.completion is not None
        self.node = node
        self.message = message
        """To be put into the conversation as it is."""
        self._setting = setting
        self._agent = agent
        self._tree = tree
        self._completion = node.completion
        self._num_calls = 0

    @property
    def text(self) -> str:
        return self.message.content

    @property
    def token_ids(self) -> TokenIds:
        """What was sampled."""
        return self.node.token_ids

    @property
    def prompt_ids(self) -> TokenIds:
        assert self.node.parent is not None
        return self.node.parent.all_ids()

    @property
    def logprobs(self) -> Floats:
        return self._completion.logprobs

    @property
    def stop_reason(self) -> StopReason:
        return self._completion.stop_reason

    def then(self, what: str | TokenIds, *, role: str = "tool") -> Context:
        """This reply with something behind it, for agent.generate(). Text is encoded by itself."""
        if isinstance(what, str):
            ids = self._setting.environment.encoder.encode_text(what, special=False)
            return Context(self._tree, self.node, ids, role=role, text=what)
        return Context(self._tree, self.node, np.asarray(what, dtype=np.int32), role=role, text="")

    async def call(self, tool: Tool | Callable[..., Any], **arguments: Any) -> str:
        """Call a tool for this reply; its result as the model reads it. Errors are results too."""
        tool = as_tool(tool)
        self._num_calls += 1
        self._setting.counts.tool_calls += 1
        return await self._run(tool, tool.name, arguments, f"#{self._num_calls}")

    async def call_tool(self, call: Mapping[str, Any], box: Mapping[str, Tool]) -> Message:
        """The answer to one of message.tool_calls."""
        function = call["function"]
        name = function["name"]
        result = await self._run(box.get(name), name, function["arguments"], call["id"])
        return Message(role="tool", content=result, name=name, tool_call_id=call["id"])

    async def _run(
        self, tool: Tool | None, name: str, arguments: str | Mapping[str, Any], ordinal: str
    ) -> str:
        counts, log = self._setting.counts, self._setting.log
        limits = self._setting.environment.config.limits
        key = f"tool/{self._agent}/{self.node.digest}/{ordinal}"
        event = log.events.get(key)
        if event == BEGUN:
            result, is_ok = f"{ERROR}the result of {name} was lost; it is not called twice", False
        elif event is not None:
            result, is_ok = str(event["result"]), bool(event["ok"])
        else:
            if tool is not None and tool.is_once:
                log.record(key, BEGUN)
            result, is_ok = await run_tool(
                tool, name, arguments, timeout_s=limits.tool_timeout_s, max_chars=limits.max_result_chars
            )
            self._setting.check()  # of a tool that asks an agent: what a stopped engine made of it is no result
            log.record(key, {"result": result, "ok": is_ok})
        counts.tool_errors += not is_ok
        self.node.metadata.setdefault("tools", []).append({"name": name, "ok": is_ok})
        return result


class Context:
    """A reply and what follows it. It becomes part of the tree when it is first continued."""

    def __init__(self, tree: TokenTree, parent: Node, token_ids: TokenIds, *, role: str, text: str) -> None:
        self._tree = tree
        self._parent = parent
        self._token_ids = token_ids
        self._role = role
        self._text = text
        self._node: Node | None = None

    def node(self) -> Node:
        if self._node is None:
            self._node = self._tree.observe(self._parent, self._token_ids, role=self._role, text=self._text)
        return self._node
