"""How a model was trained, in its own folder (rill.json): what it has to be asked in the same way.

Written by the driver when a run has left its model; read by `rill serve`, `rill chat` and `rill push`. A folder without
one is any model of transformers: it is asked through its chat template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rill.errors import ModelError

FILE = "rill.json"
BARE_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""Puts messages to a model as the plain text that it was trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCard:
    run: str
    workflow: str
    prompts: Literal["chat", "bare"]
    """Through the tokenizer's chat template, or as plain text."""
    base_model: str = ""
    """Empty: trained from nothing."""
    example: str = ""
    """A prompt of the training data."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int = 0
    """0: not known."""

    def template(self, own: str | None) -> str | None:
        """The chat template that asks as training did, from the tokenizer's own."""
        if self.prompts == "bare":
            return BARE_TEMPLATE
        if not own:
            return None
        # What a client passes by itself still counts.
        given = [
            f"{{%- if {name} is not defined %}}{{% set {name} = {json.dumps(value)} %}}{{% endif -%}}"
            for name, value in self.template_arguments.items()
        ]
        return "".join(given) + own

    def save(self, folder: Path) -> None:
        (folder / FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def read_card(folder: Path) -> TrainingCard | None:
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        return TrainingCard(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"{path} is damaged ({error}): delete it, and the model is asked as any other"
        ) from error
