"""What a chat template writes around messages, found out once: a turn is then put between, not rendered.

    <tool>│ content │</tool><assistant>        rendered with marks for the contents and the ids of calls

A template can look at a content only by comparing it with constants of its own, by trimming it, or by escaping it. So
the marks hold what trimming and escaping change, and a content that is empty or holds one of the constants is
rendered. Used by rill.data.chat.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jinja2 import Environment, TemplateSyntaxError, nodes

from rill.types import Message

_MARK = "rill7\"\\'<é&>{}%"


@dataclass(frozen=True, slots=True)
class Frame:
    pieces: tuple[str, ...]
    """The text before, between and behind what messages say."""
    fields: tuple[tuple[bool, int], ...]
    """Between the pieces: (whether it is an id, the message's number)."""
    is_trimmed: bool = False

    def filled(self, messages: Sequence[Message]) -> str:
        parts = [self.pieces[0]]
        for (is_id, number), piece in zip(self.fields, self.pieces[1:], strict=True):
            message = messages[number]
            said = message.tool_call_id or "" if is_id else message.content
            parts += (said.strip() if self.is_trimmed else said, piece)
        return "".join(parts)


def find_frame(messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> Frame | None:
    """None: the template does more than to put the contents of these messages between text."""

    def marked(blank: str) -> list[Message]:
        ids = [None if m.tool_call_id is None else f"rill7id{n:02d}" for n, m in enumerate(messages)]
        return [
            replace(message, content=f"{blank}{_MARK}{n}x{blank}", tool_call_id=ids[n])
            for n, message in enumerate(messages)
        ]

    text = render(marked(""))
    pieces, fields, at = [], [], 0
    for found in re.finditer(rf"{re.escape(_MARK)}(\d+)x|rill7id(\d\d)", text):
        pieces.append(text[at : found.start()])
        fields.append((found[1] is None, int(found[1] or found[2])))
        at = found.end()
    frames = [Frame((*pieces, text[at:]), tuple(fields), is_trimmed) for is_trimmed in (False, True)]
    if {number for is_id, number in fields if not is_id} != set(range(len(messages))):
        return None
    padded = marked(" \n")
    text = render(padded)
    return next((frame for frame in frames if frame.filled(padded) == text), None)


def compared_constants(template: str) -> re.Pattern[str] | None:
    """What the template compares texts with, or splits them at. None: it cannot be read."""
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateSyntaxError:
        return None
    constants = {
        constant.value
        for kind in (nodes.Compare, nodes.Call, nodes.Filter)
        for node in tree.find_all(kind)
        for constant in node.find_all(nodes.Const)
        if isinstance(constant.value, str) and constant.value
    }
    return re.compile("|".join(map(re.escape, sorted(constants))) or r"(?!)")
