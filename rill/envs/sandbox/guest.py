"""The inside of a sandbox: takes requests from its pipe and carries them out. Started by bubblewrap.py only.

Uses the standard library alone and is started with -I -S, so that it is up in some milliseconds. Whatever runs here may
take this process over: the outside reads its answers as data from a stranger, and throws it away afterwards.

    exec, python, read, write      a session: commands and programs one after the other, files between them
    load, do                       a program that is asked from outside (see checks.py): calls, attributes, operators
    check                          the other side: runs checks and asks for what the program has, one question at a time
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import io
import json
import operator
import os
import resource
import selectors
import signal
import struct
import subprocess
import sys
import time

TYPE_CHECKING = False  # typing's own would cost every sandbox some milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

LENGTH = struct.Struct("<I")
FIRST_UID, NUM_UIDS = 200_000, 50_000
MAX_ITEMS = 100_000
"""Of an iterable that is carried over."""
CHUNK = 65_536


def main() -> None:
    channel = Channel(os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    limits = channel.read()
    sys.path += limits["packages"]
    become_nobody()
    set_limits(limits)
    channel.write({"ok": True})
    session = Session(channel, limits)
    while (request := channel.read()) is not None:
        channel.write(session.answer(request))


class Channel:
    """Frames of JSON over two pipes."""

    def __init__(self, source: int, sink: int) -> None:
        self.fds = (source, sink)
        for fd in self.fds:
            os.set_inheritable(fd, False)

    def read(self) -> Any:
        head = self._take(LENGTH.size)
        return None if head is None else json.loads(self._take(LENGTH.unpack(head)[0]) or b"null")

    def write(self, value: Any) -> None:
        data = json.dumps(value).encode("utf-8", "surrogatepass")
        data = LENGTH.pack(len(data)) + data
        while data:
            data = data[os.write(self.fds[1], data) :]

    def _take(self, count: int) -> bytes | None:
        data = b""
        while len(data) < count:
            chunk = os.read(self.fds[0], min(CHUNK, count - len(data)))
            if not chunk:
                return None
            data += chunk
        return data


def become_nobody() -> None:
    """Where the sandbox was made by root: a user that owns nothing, and that no other sandbox is likely to share."""
    if os.getuid() != 0:
        return
    uid = FIRST_UID + int.from_bytes(os.urandom(4), "little") % NUM_UIDS
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def set_limits(limits: dict[str, Any]) -> None:
    """For this process and all that come of it."""
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["num_files"]),
        (resource.RLIMIT_NPROC, limits["num_processes"] + 1),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


class Session:
    def __init__(self, channel: Channel, limits: dict[str, Any]) -> None:
        self.channel = channel
        self.limits = limits
        self.program: Program | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            match request["op"]:
                case "exec":
                    return self.run(request, lambda pipes: start_command(request["argv"], pipes))
                case "python":
                    return self.run(request, lambda pipes: self.fork(request["code"], pipes))
                case "read":
                    return {"data": read_file(request["path"], request["max_bytes"])}
                case "write":
                    return write_file(request["path"], base64.b64decode(request["data"]))
                case "load":
                    self.program = Program()
                    return self.program.load(request["code"])
                case "do":
                    assert self.program is not None
                    return self.program.do(request)
                case "check":
                    return self.check(request)
                case other:
                    return {"error": f"no such request: {other}"}
        except OSError as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def run(self, request: dict[str, Any], start: Callable[[list[int]], int]) -> dict[str, Any]:
        """A process with its input, until it ends, its time is over or it says too much."""
        pipes = [*os.pipe(), *os.pipe(), *os.pipe()]
        try:
            pid = start(pipes)
        except (OSError, ValueError) as error:
            for fd in pipes:
                os.close(fd)
            said = base64.b64encode(f"{type(error).__name__}: {error}".encode()).decode()
            return {"code": 127, "stdout": "", "stderr": said, "ended": "error"}
        for fd in (pipes[0], pipes[3], pipes[5]):
            os.close(fd)
        given = base64.b64decode(request.get("stdin", ""))
        heard, ended = Talk(pid, pipes[1], (pipes[2], pipes[4]), given).until_end(
            request["timeout_s"], request["output_bytes"]
        )
        # What it started and left running goes with it; its own status stays what it was.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if ended == "ok" and code != 0:
            ended = "error"
        out, err = (base64.b64encode(each).decode() for each in heard)
        return {"code": code, "stdout": out, "stderr": err, "ended": ended}

    def fork(self, code: str, pipes: list[int]) -> int:
        """A Python program in a copy of this process: no interpreter has to start."""
        pid = os.fork()
        if pid:
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            return pid
        status = 1
        try:
            os.setpgid(0, 0)
            for fd, number in ((pipes[0], 0), (pipes[3], 1), (pipes[5], 2)):
                os.dup2(fd, number)
            os.closerange(3, 64)
            sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode) for n, mode in enumerate("rww"))
            sys.argv = ["program"]
            status = run_main(code)
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def check(self, request: dict[str, Any]) -> dict[str, Any]:
        """In a copy of this process, which talks to the outside while it lives."""
        pid = os.fork()
        if pid:
            _, status = os.waitpid(pid, 0)
            return {"done": status == 0}
        status = 1
        try:
            Checker(self.channel, request).run()
            status = 0
        finally:
            os._exit(status)


def start_command(argv: list[str], pipes: list[int]) -> int:
    process = subprocess.Popen(
        argv, stdin=pipes[0], stdout=pipes[3], stderr=pipes[5], start_new_session=True, close_fds=True
    )
    process.returncode = 0  # waited for by us
    return process.pid


def run_main(code: str) -> int:
    """As a script would be run; its exit code."""
    try:
        exec(compile(code, "<program>", "exec"), {"__name__": "__main__", "__builtins__": builtins})
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001  boundary: a program may raise anything
        import traceback

        traceback.print_exc()
        return 1
    return 0


class Talk:
    """Feeds a process its input and collects both outputs, until it has ended."""

    def __init__(self, pid: int, sink: int, sources: tuple[int, int], given: bytes) -> None:
        self.exit = os.pidfd_open(pid)
        self.sink = sink
        self.given = given
        self.sources = sources
        self.heard = {fd: bytearray() for fd in sources}
        self.selector = selectors.DefaultSelector()
        for fd in (*sources, self.exit):
            self.selector.register(fd, selectors.EVENT_READ)
        for fd in (sink, *sources):
            os.set_blocking(fd, False)
        self.selector.register(sink, selectors.EVENT_WRITE)

    def until_end(self, timeout_s: float, limit: int) -> tuple[list[bytes], str]:
        deadline, ended = time.monotonic() + timeout_s, ""
        while not ended:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                ended = "timeout"
            for key, _ in self.selector.select(max(0.0, left_s)):
                if key.fd == self.exit:
                    ended = ended or "ok"
                elif key.fd == self.sink:
                    self.feed()
                else:
                    self.hear(key.fd)
            if sum(map(len, self.heard.values())) > limit:
                ended = "output"
        for fd in self.sources:  # what stands in the pipes when it is over
            while ended == "ok" and self.hear(fd) and len(self.heard[fd]) <= limit:
                pass
        self.selector.close()
        for fd in (self.exit, *self.sources, *([self.sink] if self.sink >= 0 else [])):
            os.close(fd)
        return [bytes(self.heard[fd][:limit]) for fd in self.sources], ended

    def feed(self) -> None:
        try:
            self.given = self.given[os.write(self.sink, self.given[:CHUNK]) :] if self.given else b""
        except OSError:
            self.given = b""
        if not self.given:
            self.selector.unregister(self.sink)
            os.close(self.sink)
            self.sink = -1

    def hear(self, fd: int) -> bool:
        """Whether there was something."""
        try:
            chunk = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        self.heard[fd] += chunk
        if not chunk and fd in self.selector.get_map():
            self.selector.unregister(fd)
        return bool(chunk)


def read_file(path: str, max_bytes: int) -> str:
    with open(path, "rb") as file:
        return base64.b64encode(file.read(max_bytes)).decode()


def write_file(path: str, data: bytes) -> dict[str, Any]:
    folder = os.path.dirname(path)
    if folder:
        os.makedirs(folder, exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
    return {"ok": True}


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
                answer: dict[str, Any] = {"passed": True}
            except BaseException as error:  # noqa: BLE001  boundary: a check fails by raising anything
                answer = {"passed": False, "error": f"{type(error).__name__}: {str(error)[:300]}"}
            self.channel.write(answer)

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


for _name in (
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
):
    setattr(Remote, f"__{_name}__", _binary(_name))


if __name__ == "__main__":
    main()
