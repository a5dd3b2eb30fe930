"""Every key of a configuration explained: what it is called, what may stand there, what stands there, what it means.

Called by `rill config keys`, and by error messages for what a missing key must be.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rill.config.base import OneOf, default_type
from rill.config.toml import show_value


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyHelp:
    """One configuration key, for people."""

    name: str
    type: str
    value: str
    description: str


def describe_keys(config: BaseModel, prefix: str = "", choices: str = "") -> Iterator[KeyHelp]:
    """Every key of a configuration in the order of its fields, through tables and chosen parts. `choices`: what the
    `type` of a chosen part could also be."""
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from describe_keys(value, f"{prefix}{name}.", _choices(field))
            continue
        plain = config.model_dump(mode="json", include={name})[name]
        yield KeyHelp(
            name=f"{prefix}{name}",
            type=choices if choices and name == "type" else type_words(with_marks(field)),
            value="unset" if plain is None else show_value(plain),
            description=" ".join((field.description or "").split()),
        )


def type_words(annotation: Any) -> str:
    """What may stand there, in words: the choices of a closed set rather than its name in Python."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        chosen = next((mark for mark in arguments[1:] if isinstance(mark, OneOf)), None)
        return _one_of(sorted(chosen.registry)) if chosen is not None else type_words(arguments[0])
    if origin is Literal:
        return _one_of(arguments)
    if origin in (Union, types.UnionType):
        return " or ".join("unset" if member is type(None) else type_words(member) for member in arguments)
    if origin is tuple and Ellipsis not in arguments:
        return f"[{', '.join(type_words(member) for member in arguments)}]"
    if origin in (tuple, list):
        return f"list of {type_words(arguments[0])}"
    if origin is dict:
        return f"table of {type_words(arguments[1])}"
    if inspect.isclass(annotation) and issubclass(annotation, Enum):
        return _one_of([member.value for member in annotation])
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return f"table with {', '.join(annotation.model_fields)}"
    return {str: "text", bool: "true | false", Any: "anything"}.get(annotation) or str(annotation.__name__)


def with_marks(field: FieldInfo) -> Any:
    """A field's annotation with the OneOf that pydantic keeps beside it, and behind that the default part's type."""
    marks = tuple(mark for mark in field.metadata if isinstance(mark, OneOf))
    return Annotated[field.annotation, *marks, default_type(field)] if marks else field.annotation


def _choices(field: FieldInfo) -> str:
    marks = [mark for mark in field.metadata if isinstance(mark, OneOf)]
    return _one_of(sorted(marks[0].registry)) if marks else ""


def _one_of(choices: Sequence[object]) -> str:
    return " | ".join(str(choice) for choice in choices)
