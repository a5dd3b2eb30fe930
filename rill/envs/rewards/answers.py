"""Finds the final answer in a response. Linear-time scans only: a hostile response cannot make them slow."""

from __future__ import annotations

import re
from enum import StrEnum

NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,4})?|[-+]?\.\d+")
MAX_CHARACTERS = 200_000
"""Longer responses are searched in their last part only."""


class AnswerForm(StrEnum):
    """Where the answer stands in a response."""

    WHOLE = "whole"  # the response is the answer
    LAST_LINE = "last_line"  # its last line that is not empty
    LAST_NUMBER = "last_number"
    BOXED = "boxed"  # inside the last \boxed{…}
    TAG = "tag"  # inside the last <answer>…</answer>
    HASHES = "hashes"  # after the last ####


def extract_answer(text: str, form: AnswerForm) -> str | None:
    """The answer without surrounding space; None when the response has none of this form."""
    text = text[-MAX_CHARACTERS:]
    match form:
        case AnswerForm.WHOLE:
            return text.strip()
        case AnswerForm.LAST_LINE:
            lines = text.strip().splitlines()
            return lines[-1].strip() if lines else None
        case AnswerForm.LAST_NUMBER:
            numbers = NUMBER.findall(text)
            return numbers[-1] if numbers else None
        case AnswerForm.BOXED:
            return _boxed(text)
        case AnswerForm.TAG:
            _, mark, tail = text.rpartition("<answer>")
            inside, end, _ = tail.partition("</answer>")
            return inside.strip() if mark and end else None
        case AnswerForm.HASHES:
            _, mark, tail = text.rpartition("####")
            return tail.strip() if mark else None


def _boxed(text: str) -> str | None:
    r"""The contents of the last \boxed{…}, with balanced braces."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    first = start + len("\\boxed{")
    for at in range(first - 1, len(text)):
        if text[at] == "{":
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if depth == 0:
                return text[first:at].strip()
    return None


def parse_number(text: str) -> float | None:
    """A plain number, with thousands separators, a percent sign, a currency sign or a fraction allowed."""
    cleaned = text.strip().rstrip(".").replace(",", "").replace("$", "").replace("−", "-").strip()
    percent = cleaned.endswith("%")
    cleaned = cleaned[:-1] if percent else cleaned
    head, slash, tail = cleaned.partition("/")
    try:
        value = float(head) / float(tail) if slash else float(head)
    except (ValueError, ZeroDivisionError):
        return None
    return value / 100.0 if percent else value
