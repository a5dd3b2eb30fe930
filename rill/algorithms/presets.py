"""Algorithms by name: what `algorithm = "dapo"` stands for, key by key.

A recipe may override any key; a part given with another `type` replaces the preset's part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rill.registry import unknown_name_message

PRESETS: dict[str, dict[str, Any]] = {
    # arXiv 2402.03300; the paper's KL term is kl.coefficient = 0.04, off here as in most of today's runs
    "grpo": {
        "advantage": {"type": "grpo"},
        "loss": {"type": "clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "seq-mean-token-mean",
    },
}


def expand(value: Any) -> Any:
    """A name, or a mapping with `type`, as the full set of keys; anything else is left for validation to refuse."""
    if isinstance(value, str):
        value = {"type": value}
    if not isinstance(value, Mapping):
        return value
    name = value.get("type", "grpo")
    if name not in PRESETS:
        raise ValueError(unknown_name_message("algorithm", str(name), PRESETS))
    return _merged(PRESETS[name], {**value, "type": name})


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = base.get(key)
        if isinstance(value, str) and isinstance(below, Mapping) and "type" in below:
            value = {"type": value}
        if isinstance(value, Mapping) and isinstance(below, Mapping) and _same_part(below, value):
            merged[key] = _merged(below, value)
        else:
            merged[key] = value
    return merged


def _same_part(below: Mapping[str, Any], over: Mapping[str, Any]) -> bool:
    return "type" not in over or over["type"] == below.get("type")
