"""From a plain dictionary to a validated Config, or to an error a person can act on; and back to text.

An error names the file and line (or the command line), the key, the value, what was expected and the nearest valid
key. All mistakes of a recipe are reported at once.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from rill.config.base import Config, OneOf, PartConfig, config_of, value_at
from rill.config.keys import type_words, with_marks
from rill.config.toml import dumps, leaves, show_value
from rill.config.words import did_you_mean
from rill.errors import ConfigError, UnknownNameError

DEFAULT = "default"
_MAX_SHOWN = 80
_EXPECTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "a text",
    "model_type": "a table of keys",
    "dict_type": "a table of keys",
    "tuple_type": "a list, such as ['a', 'b']",
    "list_type": "a list, such as ['a', 'b']",
}
"""Kinds of pydantic's, in shorter words than its own."""

C = TypeVar("C", bound=BaseModel)


def resolve(
    model: type[C], values: Mapping[str, Any], provenance: Mapping[str, str] | None = None, source: str = ""
) -> C:
    """A validated `model`. `provenance` is load_recipe's; `source` names the whole, for keys that are missing."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        report = _Report(model, values, provenance or {}, source)
        raise ConfigError(report.write(error)) from None


def dump_config(config: BaseModel, provenance: Mapping[str, str] | None = None) -> str:
    """The whole configuration as TOML, every value with where it came from. Reading it back gives the same."""
    values, given = config.model_dump(mode="json"), provenance or {}
    sources = {key: source_of(key, given) for key, _ in leaves(values)}
    return dumps(values, sources, _handed_down(config, values, given))


def _handed_down(
    config: BaseModel, values: Mapping[str, Any], provenance: Mapping[str, str]
) -> dict[str, str]:
    """Keys that have their value from another one, since nobody gave them one of their own, with words for it."""
    if not isinstance(config, Config):
        return {}
    return {
        key: f"follows {source}" if "." in source else f"follows the recipe's {source}"
        for key, source in config.handed_down.items()
        if not any(given == key or given.startswith(f"{key}.") for given in provenance)
        and value_at(values, key) == value_at(values, source)
    }


def source_of(key: str, provenance: Mapping[str, str]) -> str:
    """Where a dotted key was set, or "default"."""
    if key in provenance:
        return provenance[key]
    parent, _, name = key.rpartition(".")
    # `engine = "vllm"` sets engine.type.
    return provenance.get(parent, DEFAULT) if name == "type" else DEFAULT


class _Report:
    """Words for the mistakes pydantic found."""

    def __init__(
        self, model: type[BaseModel], values: Mapping[str, Any], provenance: Mapping[str, str], source: str
    ) -> None:
        self._model = model
        self._values = values
        self._provenance = provenance
        self._source = source

    def write(self, error: ValidationError) -> str:
        lines: dict[str, list[str]] = {}
        mistakes = [(self._as_given(mistake["loc"]), mistake) for mistake in error.errors(include_url=False)]
        said = {given for given, mistake in mistakes if given == mistake["loc"]}
        for given, mistake in mistakes:
            if given != mistake["loc"] and given in said:
                continue  # what was handed down is wrong wherever it arrives, but was given once
            head, problem = self._explain(mistake["type"], given, mistake["msg"], mistake.get("ctx"))
            lines.setdefault(head, [])
            if problem not in lines[head]:
                lines[head].append(problem)
        # Each member of a union complains by itself; together they are one mistake.
        return "\n".join(f"{head}{', or '.join(problems)}" for head, problems in lines.items())

    def _as_given(self, loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
        """Where the user gave the value at `loc`: a key that nobody set has it from another (`handed_down`)."""
        if not issubclass(self._model, Config):
            return loc
        for key, source in self._model.handed_down.items():
            parts = tuple(key.split("."))
            if loc[: len(parts)] == parts and value_at(self._values, key) is None:
                return self._as_given((*source.split("."), *loc[len(parts) :]))
        return loc

    def _explain(self, kind: str, loc: Sequence[int | str], message: str, context: Any) -> tuple[str, str]:
        if kind == "value_error" and isinstance(context["error"].__cause__, UnknownNameError):
            loc = (*loc, "type")  # the part's name is wrong, not the table
        path, value = self._reach(loc, allow_missing=kind == "missing")
        key = ".".join(str(part) for part in path)
        where = self._where(key)
        if kind == "missing":
            return f"{where}{key}: ", f"missing: {self._field_help(path)}"
        shown = f"{key} = {show_value(value)}" if key and _is_short(value) else key
        head = f"{where}{shown}: " if shown else where
        if kind == "extra_forbidden":
            return head, f"unknown key{self._nearest(path)}"
        if kind in ("value_error", "assertion_error"):
            return head, message.partition(", ")[2]
        if kind in _EXPECTED:
            return head, f"expected {_EXPECTED[kind]}"
        expected = message.removeprefix("Input should be ")
        return head, expected if expected == message else f"expected {expected}"

    def _where(self, key: str) -> str:
        """The line of a key, else of a value in it, of the nearest table or value around it, else the whole recipe."""
        found = self._provenance.get(key) or self._provenance.get(f"[{key}]")
        found = found or next(
            (at for given, at in self._provenance.items() if given.startswith(f"{key}.")), None
        )
        while found is None and key:
            key = key.rpartition(".")[0]
            found = self._provenance.get(f"[{key}]") or self._provenance.get(key)
        return f"{found or self._source}: " if found or self._source else ""

    def _reach(self, loc: Sequence[int | str], allow_missing: bool) -> tuple[list[int | str], Any]:
        """The part of `loc` that is in the values (pydantic appends the names of union members), and what is there."""
        path: list[int | str] = []
        value: Any = self._values
        for part in loc:
            inside = isinstance(value, Mapping) and part in value
            inside = inside or (
                isinstance(value, (list, tuple)) and isinstance(part, int) and part < len(value)
            )
            if not inside:
                if allow_missing and part == loc[-1]:
                    path.append(part)
                break
            path.append(part)
            value = value[part]
        return path, value

    def _nearest(self, path: Sequence[int | str]) -> str:
        owner = _model_at(self._model, self._values, path[:-1])
        if owner is None:
            return ""
        table = ".".join(str(part) for part in path[:-1])
        keys = _all_keys(self._model, self._values, "")
        return did_you_mean(str(path[-1]), owner.model_fields, keys, table)

    def _field_help(self, path: Sequence[int | str]) -> str:
        owner = _model_at(self._model, self._values, path[:-1])
        field = owner.model_fields.get(str(path[-1])) if owner else None
        if field is None:
            return "it has no default"
        if field.description:
            return " ".join(field.description.split())
        return f"it has no default and must be {type_words(field.annotation)}"


def _model_at(
    model: type[BaseModel], values: Mapping[str, Any], path: Sequence[int | str]
) -> type[BaseModel] | None:
    """The Config class that describes the table at `path`."""
    annotation: Any = model
    value: Any = values
    part: Any
    for part in path:
        owner = _model_of(annotation, value)
        if owner is not None:
            field = owner.model_fields.get(str(part))
            if field is None:
                return None
            annotation = with_marks(field)
        else:
            annotation = _element_of(annotation)
        value = value[part] if isinstance(value, (Mapping, list, tuple)) else None
    return _model_of(annotation, value)


def _model_of(annotation: Any, value: Any) -> type[BaseModel] | None:
    """The Config class in an annotation: itself, one of a union, or the part that a OneOf's value chooses."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        for mark in metadata:
            if isinstance(mark, OneOf):
                return _chosen_part(mark, value, metadata[-1])
        return _model_of(inner, value)
    if origin in (Union, types.UnionType):
        found = (_model_of(member, value) for member in get_args(annotation))
        return next((model for model in found if model is not None), None)
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation
    return None


def _chosen_part(mark: OneOf, value: Any, default: Any) -> type[BaseModel] | None:
    name = value.get("type", default) if isinstance(value, Mapping) else value
    if not isinstance(name, str):
        return None
    try:
        return config_of(mark.registry, name, PartConfig)
    except UnknownNameError:
        return None


def _element_of(annotation: Any) -> Any:
    """What a list or dict holds."""
    if get_origin(annotation) is Annotated:
        return _element_of(get_args(annotation)[0])
    arguments = [argument for argument in get_args(annotation) if argument not in (Ellipsis, type(None))]
    return arguments[-1] if arguments else Any


def _all_keys(model: type[BaseModel], values: Any, prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        value = values.get(name) if isinstance(values, Mapping) else None
        if value is None and isinstance(field.default, BaseModel):
            value = field.default.model_dump()
        inner = _model_of(with_marks(field), value)
        if inner is not None and inner is not model:
            yield from _all_keys(inner, value, f"{prefix}{name}.")


def _is_short(value: Any) -> bool:
    return not isinstance(value, Mapping) and len(show_value(value)) <= _MAX_SHOWN
