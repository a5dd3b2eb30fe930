"""The base of every configuration: strict, frozen, and chosen by `type` where several parts fit one place.

A part's configuration is the class `Config` inside the part, so that it is read, documented and built in one
file. Unknown keys are errors. Every field has a docstring with its unit and its off-value.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, InitErrorDetails, core_schema

from rill.errors import UnknownNameError
from rill.registry import Registry


class Config(BaseModel):
    """Base class of all configurations."""

    model_config = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,  # a field whose off-value is infinite says so
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,
        arbitrary_types_allowed=False,
    )

    handed_down: ClassVar[Mapping[str, str]] = {}
    """Dotted keys that take their value from another key unless they are given: key -> that key. They are not written
    out with a resolved configuration, so that whoever changes the one there changes the other."""

    @model_validator(mode="before")
    @classmethod
    def _hand_down(cls, values: Any) -> Any:
        """Fill what is said once into the tables that need it too. A table that is off stays off."""
        if not isinstance(values, dict):
            return values
        for key, source in cls.handed_down.items():
            value, table = value_at(values, source), key.partition(".")[0]
            is_off = table not in values and not cls.model_fields[table].is_required()
            is_off = is_off and cls.model_fields[table].get_default(call_default_factory=True) is None
            if value and not is_off:
                values = _with_default(values, key.split("."), value)
        return values

    @model_validator(mode="before")
    @classmethod
    def _refuse_flags_for_numbers(cls, values: Any) -> Any:
        """`true` is no 1."""
        flags = [k for k, v in values.items() if isinstance(v, bool)] if isinstance(values, dict) else []
        wrong = {k: _members(cls.model_fields[k].annotation) for k in flags if k in cls.model_fields}
        errors = [
            InitErrorDetails(
                type="int_type" if float not in kinds else "float_type", loc=(k,), input=values[k]
            )
            for k, kinds in wrong.items()
            if {int, float} & kinds and bool not in kinds
        ]
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return values

    @model_validator(mode="before")
    @classmethod
    def _keep_default_types(cls, values: Any) -> Any:
        """A key of a part that is given without the part's `type` is one of the default part's."""
        if not isinstance(values, dict):
            return values
        untyped = {
            name: value for name, value in values.items() if isinstance(value, dict) and "type" not in value
        }
        for name in untyped.keys() & cls.model_fields.keys():
            if (default := default_type(cls.model_fields[name])) is not None:
                values = {**values, name: {"type": default, **untyped[name]}}
        return values


class PartConfig(Config):
    """Base of configurations that are chosen by name; a part narrows `type` to its own name."""

    type: str


C = TypeVar("C", bound=Config)


class OneOf:
    """Marks a field that holds the Config of any part in a registry, chosen by its `type` key.

    >>> class Rollout(Config):
    ...     engine: Annotated[PartConfig, OneOf(ENGINES)]
    ...
    >>> Rollout(engine={"type": "vllm", "dtype": "bfloat16"}).engine   # a rill.inference.vllm.VllmEngine.Config
    """

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self._choose,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda part: part.model_dump()),
        )

    def _choose(self, value: Any) -> PartConfig:
        if isinstance(value, PartConfig):
            return value
        if isinstance(value, str):
            value = {"type": value}
        if not isinstance(value, dict) or "type" not in value:
            raise ValueError(f"needs a key 'type', one of: {', '.join(sorted(self.registry))}")
        try:
            schema = config_of(self.registry, value["type"], PartConfig)
            _check_type(schema, value["type"])
        except UnknownNameError as error:
            raise ValueError(str(error)) from error
        return schema.model_validate(value)


def _members(annotation: Any) -> set[Any]:
    """The types of a union, or the one there is."""
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        return set().union(*map(_members, get_args(annotation)))
    return {annotation} if isinstance(annotation, type) else set()


def as_table(value: Any) -> Any:
    """A copy that may be written to; a bare name is short for a table with that `type`."""
    if isinstance(value, str):
        return {"type": value}
    return dict(value) if isinstance(value, dict) else value


def value_at(values: Any, key: str) -> Any:
    """The value of a dotted key in nested tables; None where there is none."""
    for part in key.split("."):
        if not isinstance(values, Mapping):
            return None
        values = values.get(part)
    return values


def _with_default(values: Any, path: Sequence[str], value: Any) -> Any:
    """`values` with `value` at the path, unless something is there."""
    table = as_table({} if values is None else values)
    if not isinstance(table, dict):
        return values  # a Config that was built before: it has all it needs
    if len(path) == 1:
        return {path[0]: value, **table}
    return {**table, path[0]: _with_default(table.get(path[0]), path[1:], value)}


def default_type(field: FieldInfo) -> str | None:
    """The `type` of the part that a OneOf field holds when nothing is given; None for other fields, and without one."""
    if not any(isinstance(mark, OneOf) for mark in field.metadata):
        return None
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, dict):
        return str(default["type"])
    return default.type if isinstance(default, PartConfig) else None


def _check_type(schema: type[PartConfig], name: str) -> None:
    """A part of the user's that derives from one of rill's has that one's `type` unless it says otherwise."""
    annotation = schema.model_fields["type"].annotation
    if ":" in name and get_origin(annotation) is Literal and name not in get_args(annotation):
        raise UnknownNameError(
            f"the Config of {name!r} has the `type` {get_args(annotation)[0]!r} of the part it derives from: give it a "
            "Config of its own with `type: str`"
        )


def config_of(registry: Registry, name: str, base: type[C]) -> type[C]:
    """The Config inside a registered part, or inside one of the user's, "module:Class"."""
    part = registry.load(name)
    if not (inspect.isclass(part) and hasattr(part, "Config")):
        raise UnknownNameError(
            f"{name!r} cannot serve as {registry.kind}: it must be a class with a Config inside "
            "(docs/extend.md shows one of each kind)"
        )
    schema = part.Config
    if not (inspect.isclass(schema) and issubclass(schema, base)):
        raise UnknownNameError(f"the Config of {name!r} must derive from {base.__module__}.{base.__name__}")
    return schema
