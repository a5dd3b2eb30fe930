"""Programs and their checks, inside of sandboxes: what guest.py needs for `load`, `do` and `check`. See checks.py.

    load, do     a program that is asked from outside: calls, attributes, operators
    check        the other side, in another sandbox: runs checks, and asks for what the program has as they need it

The standard library alone, as guest.py.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import io
import operator
import sys

TYPE_CHECKING = False  # typing's own would cost every sandbox some milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from rill.envs.sandbox.guest import Channel

MAX_ITEMS = 100_000
"""Of an iterable that is carried over."""


# --- plain data, carried over as what it is ----------------------------------------------------------------


def encode(value: Any, keep: Callable[[Any], Any]) -> Any:
    """Plain data as JSON; what is not goes through `keep`."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    tags: dict[Any, str] = {list: "l", tuple: "t", set: "s", frozenset: "f"}
    if many := tags.get(kind):
        return {many: [encode(each, keep) for each in value]}
    if kind is dict or (kind.__module__ == "collections" and isinstance(value, dict)):
        tag = "C" if kind.__name__ == "Counter" else "d"
        return {tag: [[encode(k, keep), encode(v, keep)] for k, v in dict.items(value)]}
    if kind in (bytes, bytearray):
        return {"b": base64.b64encode(value).decode()}
    if kind is complex:
        return {"c": [value.real, value.imag]}
    if kind is range:
        return {"r": [value.start, value.stop, value.step]}
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name == "fractions.Fraction":
        return {"F": [value.numerator, value.denominator]}
    if name in ("decimal.Decimal", "_decimal.Decimal"):
        return {"D": str(value)}
    if name == "collections.deque":
        return {"q": [encode(each, keep) for each in value]}
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), keep)
    return keep(value)


def decode(value: Any, fetch: Callable[[Any], Any]) -> Any:
    if type(value) is not dict:
        return value
    ((tag, content),) = value.items()
    makers: dict[str, Any] = {"l": list, "t": tuple, "s": set, "f": frozenset}
    if tag in makers:
        return makers[tag](decode(each, fetch) for each in content)
    if tag == "d":
        return {decode(k, fetch): decode(v, fetch) for k, v in content}
    if tag == "b":
        return base64.b64decode(content)
    if tag == "c":
        return complex(*content)
    if tag == "r":
        return range(*content)
    if tag == "F":
        from fractions import Fraction

        return Fraction(*content)
    if tag == "D":
        from decimal import Decimal

        return Decimal(content)
    if tag in ("C", "q"):
        from collections import Counter, deque

        if tag == "q":
            return deque(decode(each, fetch) for each in content)
        return Counter({decode(k, fetch): decode(v, fetch) for k, v in content})
    return fetch(value)


# --- the program's side ------------------------------------------------------------------------------------


class Program:
    """A program that has run, and what it left: its names can be asked for."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
        self.kept: list[Any] = []

    def load(self, code: str) -> dict[str, Any]:
        sys.stdin = io.StringIO()
        try:
            exec(compile(code, "<program>", "exec"), self.names)
        except SystemExit as leaving:
            return {"ok": True} if leaving.code in (None, 0) else {"error": f"exit code {leaving.code}"}
        except BaseException as error:  # noqa: BLE001  boundary, as above
            return {"error": f"{type(error).__name__}: {error}"}
        return {"ok": True}

    def do(self, request: dict[str, Any]) -> dict[str, Any]:
        """One operation on what the program has; the result, or what it raised."""
        try:
            parts = [decode(part, self._fetch) for part in request["parts"]]
            named = {key: decode(value, self._fetch) for key, value in request.get("named", {}).items()}
            result = self._operate(request["what"], parts, named)
            answer = {"value": encode(result, self._keep)}
            if request["what"] == "call":
                answer["changed"] = self._changed(request["parts"], parts)
            return answer
        except BaseException as error:  # noqa: BLE001  boundary, as above
            return {"raised": type(error).__name__, "text": str(error)[:500]}

    def _operate(self, what: str, parts: list[Any], named: dict[str, Any]) -> Any:
        match what:
            case "name":
                if parts[0] not in self.names:
                    raise NameError(f"name {parts[0]!r} is not defined")
                return self.names[parts[0]]
            case "call":
                return parts[0](*parts[1:], **named)
            case "attr":
                return getattr(parts[0], parts[1])
            case "iter":
                from itertools import islice

                return list(islice(iter(parts[0]), MAX_ITEMS))
            case "len" | "str" | "repr" | "bool":
                return getattr(builtins, what)(parts[0])
            case _:
                return getattr(operator, what)(*parts)

    def _changed(self, before: list[Any], after: list[Any]) -> dict[str, Any]:
        """Arguments that the call has changed in place, by position."""
        pairs = [
            (n, old, new) for n, (old, new) in enumerate(zip(before, after)) if type(new) in (list, dict, set)
        ]
        return {str(n): now for n, old, new in pairs if (now := encode(new, self._keep)) != old}

    def _keep(self, value: Any) -> Any:
        self.kept.append(value)
        return {"h": len(self.kept) - 1}

    def _fetch(self, value: Any) -> Any:
        return self.kept[value["h"]]


# --- the checker's side ------------------------------------------------------------------------------------


class Checker:
    """Runs checks in a process that the program has never been in. Names that a check does not define itself are the
    program's, and are asked for; built-in names and modules of the standard library are always this side's."""

    def __init__(self, channel: Channel, request: dict[str, Any]) -> None:
        self.channel = channel
        self.checks: list[str] = request["checks"]
        self.imported: dict[str, list[str]] = request["imported"]
        """Names that the program took from libraries, with module and attribute: they are taken from there again."""

        self.defined: set[str] = set(request["defined"])
        """Functions and classes of the program's."""
        self.bases: set[str] = set()
        """Names that a check looks something up in: `math` in math.isclose. A function may be called like a module."""

    def run(self) -> None:
        import ast

        names: dict[str, Any] = {"__name__": "__checks__", "__builtins__": builtins}
        for index, check in enumerate(self.checks):
            try:
                tree = ast.parse(check)
                nodes = list(ast.walk(tree))
                looked = [node.value for node in nodes if isinstance(node, ast.Attribute)]
                self.bases |= {node.id for node in looked if isinstance(node, ast.Name)}
                used = {node.id for node in nodes if isinstance(node, ast.Name)} - bound_names(nodes)
                exec(compile(tree, f"<check {index}>", "exec"), Names(self, names, self._tested(used, names)))
                has_passed = True
            except BaseException:  # noqa: BLE001  boundary: a check fails by raising anything
                has_passed = False
            self.channel.write({"passed": has_passed})

    def _tested(self, used: set[str], names: dict[str, Any]) -> dict[str, Any]:
        """Functions of the program that are called like built-in ones, where the check can only mean those: it names
        nothing else of the program's."""
        others = used - names.keys() - self.imported.keys() - (self.bases & sys.stdlib_module_names)
        if any(not hasattr(builtins, name) for name in others):
            return {}
        return {name: self.ask("name", name) for name in used & self.defined if hasattr(builtins, name)}

    def ask(self, what: str, *parts: Any, **named: Any) -> Any:
        request = {
            "what": what,
            "parts": [encode(part, give) for part in parts],
            "named": {key: encode(value, give) for key, value in named.items()},
        }
        self.channel.write(request)
        answer = self.channel.read()
        if "raised" in answer:
            raised = getattr(builtins, str(answer["raised"]), None)
            known = isinstance(raised, type) and issubclass(raised, Exception)
            kind: Any = raised if known else ProgramError
            raise kind(str(answer.get("text", "")))
        for position, now in (answer.get("changed") or {}).items():
            replace_in(parts[int(position)], decode(now, self._fetch))
        return decode(answer["value"], self._fetch)

    def _fetch(self, value: Any) -> Remote:
        return Remote(self, int(value["h"]))

    def find(self, name: str) -> Any:
        import importlib

        if name in self.imported:
            module_name, attribute = self.imported[name]
            with contextlib.suppress(ImportError, AttributeError):
                module = importlib.import_module(module_name)
                return getattr(module, attribute) if attribute else module
        if name in sys.stdlib_module_names and name in self.bases:
            return importlib.import_module(name)
        return self.ask("name", name)


def bound_names(nodes: list[Any]) -> set[str]:
    """Names that a check gives a meaning itself."""
    import ast

    names = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    names |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return names | {
        (node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)
    }


def replace_in(target: Any, now: Any) -> None:
    """Make a list, dictionary or set what the program has made of its copy."""
    if type(target) is not type(now):
        return
    if type(target) is list:
        target[:] = now
    elif type(target) in (dict, set):
        target.clear()
        target.update(now)


class ProgramError(Exception):
    """An exception of the program's own."""


class Names(dict):  # type: ignore[type-arg]
    """The globals of one check: what the checks before it have left, and the program's names, asked for."""

    def __init__(self, checker: Checker, shared: dict[str, Any], tested: dict[str, Any]) -> None:
        super().__init__(shared)
        self._checker, self._shared, self._tested = checker, shared, tested

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._shared[name] = value

    def __missing__(self, name: str) -> Any:
        if name in self._tested:
            return self._tested[name]
        if hasattr(builtins, name):
            raise KeyError(name)
        return self._checker.find(name)


class Remote:
    """An object of the program's. Between it and plain data nothing holds: an object that says it equals 3 does not."""

    __slots__ = ("_checker", "_handle")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, checker: Checker, handle: int) -> None:
        object.__setattr__(self, "_checker", checker)
        object.__setattr__(self, "_handle", handle)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._checker.ask("call", self, *args, **named)

    def __getattr__(self, name: str) -> Any:
        return self._checker.ask("attr", self, name)

    def __getitem__(self, key: Any) -> Any:
        return self._checker.ask("getitem", self, key)

    def __contains__(self, key: Any) -> bool:
        return self._checker.ask("contains", self, key) is True

    def __len__(self) -> int:
        return int(self._checker.ask("len", self))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._checker.ask("iter", self))

    def __bool__(self) -> bool:
        return self._checker.ask("bool", self) is True

    def __str__(self) -> str:
        return str(self._checker.ask("str", self))

    def __repr__(self) -> str:
        return str(self._checker.ask("repr", self))


def give(value: Any) -> Any:
    if type(value) is Remote:
        return {"h": value._handle}
    raise TypeError(f"a {type(value).__name__} cannot be handed to the program: checks pass plain data")


def _binary(name: str) -> Callable[[Remote, Any], Any]:
    def operate(left: Remote, right: Any) -> Any:
        result = left._checker.ask(name, left, right)
        if type(right) is not Remote and type(result) is not Remote:
            raise TypeError("an object of the program's own cannot be compared with plain data")
        return result

    return operate


OPERATORS = (
    "eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul",
)  # fmt: skip
for _name in OPERATORS:
    setattr(Remote, f"__{_name}__", _binary(_name))
