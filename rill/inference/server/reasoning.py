"""Reasoning that a model writes before its answer, taken out of growing text: `<think>…</think>`.

    prompt …<think>⏎ │ reasoning …</think>⏎⏎answer        the template opens the block: DeepSeek R1, Qwen3 thinking
    prompt …         │ <think>⏎reasoning …</think>⏎⏎answer   the model does: Qwen3, QwQ

Only a block at the beginning of an answer is reasoning. One that is never closed is reasoning to its end.
"""

from __future__ import annotations

from rill.data.tool_calls import held_back

OPEN, CLOSE = "<think>", "</think>"


class ReasoningStream:
    """Splits growing text into (reasoning, answer)."""

    def __init__(self, *, is_open: bool) -> None:
        """`is_open`: the prompt ends inside of a block."""
        self._is_inside: bool | None = True if is_open else None
        """None: not known yet."""
        self._held = ""
        self._is_begun = False
        """The part that is being handed out has had a character: line breaks before it do not count."""

    def feed(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        self._held += text
        if self._is_inside is None:
            self._look_at_the_beginning(is_last)
        if self._is_inside is None:
            return "", ""
        if not self._is_inside:
            return "", self._visible(self._take(len(self._held)))
        reasoning, close, rest = self._held.partition(CLOSE)
        if close:
            told = self._visible(reasoning).rstrip("\n")
            self._is_inside, self._is_begun, self._held = False, False, ""
            return told, self._visible(rest)
        # Line breaks before the end of the block are not part of the reasoning.
        keep = 0 if is_last else held_back(self._held, (CLOSE,))
        size = len(self._held) - keep
        size = size if is_last else len(self._held[:size].rstrip("\n"))
        return self._visible(self._take(size)), ""

    def _look_at_the_beginning(self, is_last: bool) -> None:
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            self._is_inside, self._held = True, begun[len(OPEN) :]
        elif is_last or not OPEN.startswith(begun):
            self._is_inside, self._is_begun = False, True

    def _visible(self, text: str) -> str:
        if not self._is_begun:
            text = text.lstrip("\n")
            self._is_begun = bool(text)
        return text

    def _take(self, size: int) -> str:
        out, self._held = self._held[:size], self._held[size:]
        return out
