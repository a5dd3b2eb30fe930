"""Names for swappable parts: name -> "module:attribute", imported only when asked for.

A part's config value is its registered name. An unknown name lists the valid ones and suggests the nearest.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rill.errors import MissingExtraError, RillError, UnknownNameError


class Registry(Mapping[str, str]):
    """A visible table of parts of one kind. `load` imports; nothing else does.

    >>> ENGINES = Registry("engine", {"native": "rill.inference.native.engine:NativeEngine"})
    >>> ENGINES.load("native")
    """

    def __init__(self, kind: str, parts: Mapping[str, str]) -> None:
        self.kind = kind
        self._parts = dict(parts)

    def register(self, name: str, target: str) -> None:
        """Add a part from outside rill, e.g. `ENVIRONMENTS.register("maze", "my_lab.maze:Maze")`."""
        if name in self._parts and self._parts[name] != target:
            raise UnknownNameError(
                f"{self.kind} {name!r} is taken by {self._parts[name]}: choose another name"
            )
        self._parts[name] = target

    def load(self, name: str) -> Any:
        """The registered object, or the object behind a "module:attribute" given in place of a name."""
        if name in self._parts:
            return load_target(self._parts[name])
        if ":" in name:
            return load_target(name)
        raise UnknownNameError(unknown_name_message(self.kind, name, self._parts))

    def __getitem__(self, name: str) -> str:
        if name not in self._parts:
            raise UnknownNameError(unknown_name_message(self.kind, name, self._parts))
        return self._parts[name]

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def load_target(target: str) -> Any:
    """Import "package.module:attribute"."""
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise UnknownNameError(f"{target!r} is not of the form 'package.module:name'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise UnknownNameError(
                f"{target!r}: there is no module {error.name!r} in the current folder or on Python's path"
            ) from None
        raise _broken_module(target, error) from error
    except Exception as error:  # boundary: a module of the user's may raise anything while it is imported
        if isinstance(error, RillError) or module_name.partition(".")[0] == __package__:
            raise
        raise _broken_module(target, error) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise UnknownNameError(
            unknown_name_message(
                f"name in {module_name}", attribute, [n for n in vars(module) if n[0] != "_"]
            )
        ) from None


def load_function(target: str, *arguments: str) -> Callable[..., Any]:
    """A function that takes these arguments. Raises ValueError: called by validators of configurations, so that a
    misspelt name is found before anything is started."""
    try:
        function = load_target(target)
    except UnknownNameError as error:
        raise ValueError(str(error)) from error
    if not callable(function):
        raise ValueError(f"{target} is not a function but {type(function).__name__}")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ValueError(f"{target} cannot be called with ({', '.join(arguments)}): {error}") from error
    return function  # type: ignore[no-any-return]


def import_extra(module: str, needs: str) -> Any:
    """A library that is no part of the smallest installation. `needs`: what is missing without it, and its install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(needs) from error


def _broken_module(target: str, error: Exception) -> UnknownNameError:
    """`error` was raised by the module itself while it was imported: where, and what it said."""
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}"
    else:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}:{last.lineno}"
    return UnknownNameError(f"{target!r} cannot be imported: {where}: {type(error).__name__}: {error}")


def unknown_name_message(kind: str, name: str, valid: Mapping[str, Any] | list[str]) -> str:
    """One sentence that lists what would have been right."""
    names = sorted(valid)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown {kind} {name!r}{hint}: valid are {', '.join(names) or 'none'}"
