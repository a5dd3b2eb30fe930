"""The design's rules as tables, and a check of the tree against each.

A rule is a function from a repository's root to the breaches it finds there, so the same function judges this tree
and, further down, a small tree with a planted breach that it must find.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LEVELS = {
    "cli": 7,
    "dashboard": 7,
    "workflows": 6,
    "workers": 5,
    "decentralized": 5,
    "inference.server": 5,
    "inference": 4,
    "training": 4,
    "weights": 4,
    "envs": 4,
    "data": 4,
    "journal": 4,
    "planning": 4,
    "policies": 3,
    "runtime": 2,
    "models": 2,
    "telemetry": 1,
    "algorithms": 1,
    "types": 0,
    "errors": 0,
    "registry": 0,
    "config": 0,
}
"""Imports go down, or stay on their level."""

STRANGERS = {("training", "inference"), ("inference", "training")}
"""Rooms of one level that must not import each other: these two meet in `weights`."""

SEES_ONLY = {
    "algorithms": {"types", "errors", "registry", "config"},
    "runtime": {"errors", "registry", "config", "telemetry"},
    "planning": {"errors", "registry", "config", "telemetry", "runtime"},
    "policies": {"types", "errors", "registry", "config", "models"},
}
"""Rooms that know less than their level allows: mathematics, moving objects between workers, planning, policies."""

PURE_LIBRARIES = {
    "rill.algorithms": {"torch", "numpy", "pydantic"},
    "rill.planning": {"numpy", "msgspec", "pydantic"},
}
"""Packages that may use no library but these."""

NO_TORCH = ("rill.planning",)
"""Modules that never import torch."""

LATE_TORCH = ("rill.types", "rill.errors", "rill.registry", "rill.config", "rill.telemetry", "rill.cli")
"""Modules that may import torch inside a function only, because `rill --help` and the readers must start at once."""

FORBIDDEN_NAMES = re.compile(r"(utils?|helpers?|misc|common|stuff|old_.*|.*_v\d+|v\d+)")
MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 80
MAX_DEPTH = 4  # rill/room/folder/file.py

PACKAGE_OF = {
    "zmq": "pyzmq",
    "math_verify": "math-verify",
    "reasoning_gym": "reasoning-gym",
    "pytest_asyncio": "pytest-asyncio",
    "PIL": "pillow",
    "quack": "quack-kernels",
    "gym_pusht": "gym-pusht",
    "libero": "hf-libero",
    "mani_skill": "mani-skill",
}
"""Import names that differ from the name of their package."""

COMES_WITH = {
    "pydantic_core": "pydantic",
    "jinja2": "transformers",
    "tokenizers": "transformers",
    "huggingface_hub": "transformers",
    "triton": "torch",
    "filelock": "torch",
    "torch.utils.tensorboard": "tensorboard",
    "click": "typer",
}
"""Libraries that a declared dependency brings along."""


@dataclass(frozen=True, slots=True)
class Import:
    module: str
    """What is imported, in full: `rill.types`, `torch.nn`."""
    name: str
    """The name taken from it, or ""."""
    line: int
    is_late: bool
    """Inside a function."""
    is_typing: bool
    """Under `if TYPE_CHECKING`."""


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    line: int
    num_lines: int


@dataclass(frozen=True, slots=True)
class Source:
    """What the rules ask of a file."""

    imports: tuple[Import, ...]
    functions: tuple[Function, ...]
    stubs: tuple[int, ...]
    """Lines that raise NotImplementedError."""
    is_undescribed: bool
    """It has code and no docstring."""


# --- reading the tree -------------------------------------------------------------------------------------


def python_files(root: Path, *folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (root / folder).rglob("*.py"))


def module_name(root: Path, path: Path) -> str:
    parts = list(path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str | None:
    """`rill.inference.native.engine` → `inference`; None for the package itself and what is not rill's."""
    parts = module.split(".")
    if parts[0] != "rill" or len(parts) < 2:
        return None
    nested = ".".join(parts[1:3])
    return nested if nested in LEVELS else parts[1]


def source_of(path: Path) -> Source:
    return _read(path, path.stat().st_mtime_ns)


def imports_of(path: Path) -> tuple[Import, ...]:
    return source_of(path).imports


@functools.cache
def _read(path: Path, mtime_ns: int) -> Source:
    """Every rule asks about every file; it is parsed once, and its tree is not kept: the collector would go through
    the trees of all files again and again."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = list(_statements(tree, is_late=False, is_typing=False))
    return Source(
        imports=tuple(one for one in found if isinstance(one, Import)),
        functions=tuple(one for one in found if isinstance(one, Function)),
        stubs=tuple(one for one in found if isinstance(one, int)),
        is_undescribed=bool(tree.body) and not ast.get_docstring(tree),
    )


def _statements(node: ast.AST, *, is_late: bool, is_typing: bool) -> Iterator[Import | Function | int]:
    """What the statements within `node` are to the rules; expressions hold no statements."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, "", child.lineno, is_late, is_typing)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"relative import on line {child.lineno}"
            for alias in child.names:
                yield Import(child.module or "", alias.name, child.lineno, is_late, is_typing)
        elif isinstance(child, ast.Raise):
            if child.exc is not None and "NotImplementedError" in ast.dump(child.exc):
                yield child.lineno
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and child.end_lineno is not None:
                yield Function(child.name, child.lineno, child.end_lineno - child.lineno + 1)
            is_guard = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            yield from _statements(child, is_late=is_late or is_function, is_typing=is_typing or is_guard)


def target_room(root: Path, found: Import) -> str | None:
    """The room an import reaches into. `from rill import errors` reaches into `errors`."""
    if found.module == "rill" and found.name:
        inner = root / "rill" / found.name
        return room_of(f"rill.{found.name}") if inner.is_dir() or inner.with_suffix(".py").is_file() else None
    deeper = f"{found.module}.{found.name}"
    return room_of(deeper if room_of(deeper) in LEVELS else found.module)


def library_of(found: Import) -> str | None:
    """The third-party library an import needs; None for the standard library and rill."""
    full = f"{found.module}.{found.name}" if found.name else found.module
    for prefix, owner in COMES_WITH.items():
        if full == prefix or full.startswith(f"{prefix}."):
            return owner
    top = found.module.split(".")[0]
    return None if top in sys.stdlib_module_names or top in ("rill", "tests", "benchmarks") else top


# --- the rules --------------------------------------------------------------------------------------------


def imports_go_down(root: Path) -> Iterator[str]:
    for path in python_files(root, "rill"):
        room = room_of(module_name(root, path))
        if room is None:
            continue
        if room not in LEVELS:
            yield f"{path}: room {room!r} has no level in the table"
            continue
        for found in imports_of(path):
            target = target_room(root, found)
            if target is None or target == room:
                continue
            if LEVELS.get(target, 99) > LEVELS[room]:
                yield f"{path}:{found.line}: {room} (level {LEVELS[room]}) imports {target}, which is above it"


def strangers_stay_apart(root: Path) -> Iterator[str]:
    for path in python_files(root, "rill"):
        room = room_of(module_name(root, path)) or ""
        for found in imports_of(path):
            target = target_room(root, found) or ""
            if (room.split(".")[0], target.split(".")[0]) in STRANGERS:
                yield f"{path}:{found.line}: {room} imports {target}: they meet in weights"


def some_rooms_see_less(root: Path) -> Iterator[str]:
    for path in python_files(root, "rill"):
        room = room_of(module_name(root, path))
        if room not in SEES_ONLY:
            continue
        for found in imports_of(path):
            target = target_room(root, found)
            if target is not None and target != room and target not in SEES_ONLY[room]:
                yield f"{path}:{found.line}: {room} imports {target}; it may see {sorted(SEES_ONLY[room])}"


def rooms_form_no_circle(root: Path) -> Iterator[str]:
    edges: dict[str, dict[str, str]] = {}
    for path in python_files(root, "rill"):
        room = room_of(module_name(root, path))
        for found in imports_of(path):
            target = target_room(root, found)
            if room and target and target != room and not found.is_typing:
                edges.setdefault(room, {}).setdefault(target, f"{path}:{found.line}")
    for room in edges:
        for target, where in edges[room].items():
            if room in _reachable(edges, target):
                yield f"{where}: {room} imports {target}, and {target} leads back to {room}"


def _reachable(edges: dict[str, dict[str, str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for target in edges.get(waiting.pop(), {}):
            if target not in seen:
                seen.add(target)
                waiting.append(target)
    return seen


def nobody_imports_the_facade(root: Path) -> Iterator[str]:
    """`from rill import Channel` is for users; inside, names come from the module that owns them."""
    for path in python_files(root, "rill"):
        for found in imports_of(path):
            is_facade = found.module == "rill" and target_room(root, found) is None
            if is_facade and found.name != "__version__":
                yield f"{path}:{found.line}: imports {found.name or 'rill'} from the package itself"


def pure_packages_stay_pure(root: Path) -> Iterator[str]:
    for path in python_files(root, "rill"):
        module = module_name(root, path)
        allowed = next(
            (v for k, v in PURE_LIBRARIES.items() if module == k or module.startswith(f"{k}.")), None
        )
        for found in imports_of(path):
            library = library_of(found)
            if allowed is not None and library is not None and library not in allowed:
                yield f"{path}:{found.line}: {module} may use {sorted(allowed)}, not {library}"


def torch_stays_out(root: Path) -> Iterator[str]:
    for path in python_files(root, "rill"):
        module = module_name(root, path)
        for found in imports_of(path):
            if found.module.split(".")[0] != "torch":
                continue
            if module.startswith(NO_TORCH):
                yield f"{path}:{found.line}: {module} must work without torch"
            elif module.startswith(LATE_TORCH) and not (found.is_late or found.is_typing):
                yield f"{path}:{found.line}: {module} may import torch inside a function only"


def libraries_are_declared(root: Path) -> Iterator[str]:
    core, optional = declared_packages(root)
    for path in python_files(root, "rill"):
        for found in imports_of(path):
            library = library_of(found)
            if library is not None and PACKAGE_OF.get(library, library) not in core | optional:
                yield f"{path}:{found.line}: {library} is no dependency and no extra in pyproject.toml"


def optional_libraries_have_one_door(root: Path) -> Iterator[str]:
    core, _ = declared_packages(root)
    doors: dict[str, dict[Path, int]] = {}
    for path in python_files(root, "rill"):
        for found in imports_of(path):
            library = library_of(found)
            if library is not None and PACKAGE_OF.get(library, library) not in core:
                doors.setdefault(library, {}).setdefault(path, found.line)
    for library, places in doors.items():
        if len(places) > 1:
            yield f"{library} is imported in {len(places)} files: {', '.join(f'{p}:{n}' for p, n in places.items())}"


def names_say_something(root: Path) -> Iterator[str]:
    for path in python_files(root, "rill", "tests", "benchmarks"):
        for part in path.relative_to(root).with_suffix("").parts:
            if FORBIDDEN_NAMES.fullmatch(part.removeprefix("test_")):
                yield f"{path}: {part!r} is no name for anything"


def folders_stay_shallow(root: Path) -> Iterator[str]:
    for path in python_files(root, "rill"):
        if len(path.relative_to(root).parts) > MAX_DEPTH:
            yield f"{path}: deeper than rill/room/folder/file.py"


def files_stay_small(root: Path) -> Iterator[str]:
    for path in python_files(root, "rill", "tests", "benchmarks"):
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        if num_lines > MAX_FILE_LINES:
            yield f"{path}: {num_lines} lines, the limit is {MAX_FILE_LINES}: split it"


def functions_stay_small(root: Path) -> Iterator[str]:
    for path in python_files(root, "rill", "benchmarks"):
        for one in source_of(path).functions:
            if one.num_lines > MAX_FUNCTION_LINES:
                yield f"{path}:{one.line}: {one.name} has {one.num_lines} lines, the limit is {MAX_FUNCTION_LINES}"


def modules_say_what_they_are(root: Path) -> Iterator[str]:
    for path in python_files(root, "rill"):
        if source_of(path).is_undescribed:
            yield f"{path}: no docstring that says what it owns and who calls it"


def nothing_is_left_unwritten(root: Path) -> Iterator[str]:
    for path in python_files(root, "rill"):
        for line in source_of(path).stubs:
            yield f"{path}:{line}: a stub"


def declared_packages(root: Path) -> tuple[set[str], set[str]]:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name = re.compile(r"[A-Za-z0-9_.-]+")
    core = {name.match(line)[0] for line in project["dependencies"]}  # type: ignore[index]
    extras = project["optional-dependencies"].items()
    optional = {name.match(line)[0] for extra, lines in extras if extra != "dev" for line in lines}  # type: ignore[index]
    return core, optional


RULES: list[Callable[[Path], Iterator[str]]] = [
    imports_go_down,
    strangers_stay_apart,
    some_rooms_see_less,
    rooms_form_no_circle,
    nobody_imports_the_facade,
    pure_packages_stay_pure,
    torch_stays_out,
    libraries_are_declared,
    optional_libraries_have_one_door,
    names_say_something,
    folders_stay_shallow,
    files_stay_small,
    functions_stay_small,
    modules_say_what_they_are,
    nothing_is_left_unwritten,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule: Callable[[Path], Iterator[str]]) -> None:
    breaches = list(rule(ROOT))
    assert not breaches, "\n" + "\n".join(breaches)


# --- every rule finds a planted breach --------------------------------------------------------------------

CLEAN = {
    "rill/__init__.py": '"""The package."""\n__version__ = "1"\n',
    "rill/types.py": '"""Words."""\nimport numpy\n',
    "rill/errors.py": '"""Errors."""\n',
    "rill/algorithms/loss.py": '"""A loss."""\nimport torch\nfrom rill.types import Sample\n',
    "rill/runtime/channel.py": '"""A channel."""\nfrom rill.telemetry import trace\n',
    "rill/runtime/process/ray.py": '"""Ray."""\ndef start():\n    import ray\n',
    "rill/telemetry/trace.py": '"""Spans."""\n',
    "rill/training/engine.py": '"""Trains."""\nimport torch\nfrom rill.algorithms.loss import loss\n',
    "rill/inference/base.py": '"""Engines."""\nfrom rill.types import Prompt\n',
    "rill/inference/server/app.py": '"""Serves."""\nfrom rill.inference.base import Engine\n',
    "rill/cli/train.py": '"""Trains."""\nfrom rill import __version__\ndef train():\n    import torch\n',
    "tests/test_loss.py": "",
    "pyproject.toml": '[project]\ndependencies = ["torch>=2", "numpy", "pydantic"]\n'
    '[project.optional-dependencies]\nray = ["ray"]\ndev = ["pytest"]\n',
}

PLANTED = [
    (imports_go_down, "rill/types.py", '"""."""\nfrom rill.runtime.channel import Channel\n'),
    (
        imports_go_down,
        "rill/runtime/process/agent_client.py",
        '"""."""\ndef f():\n    from rill.workflows import loop\n',
    ),
    (imports_go_down, "rill/inference/engine.py", '"""."""\nfrom rill.inference.server.app import App\n'),
    (imports_go_down, "rill/inference/engine.py", '"""."""\nfrom rill.inference import server\n'),
    (imports_go_down, "rill/weights/tcp.py", '"""."""\nimport rill.inference.server.app\n'),
    (imports_go_down, "rill/errors.py", '"""."""\nfrom rill import telemetry\n'),
    (imports_go_down, "rill/newroom/thing.py", '"""."""\n'),
    (imports_go_down, "rill/models/loading.py", '"""."""\nfrom rill.policies.base import Policy\n'),
    (strangers_stay_apart, "rill/training/step.py", '"""."""\nfrom rill.inference.base import Engine\n'),
    (strangers_stay_apart, "rill/inference/step.py", '"""."""\nfrom rill.training.engine import Engine\n'),
    (strangers_stay_apart, "rill/inference/server/step.py", '"""."""\nimport rill.training.engine\n'),
    (some_rooms_see_less, "rill/algorithms/kl.py", '"""."""\nfrom rill.telemetry.trace import span\n'),
    (
        some_rooms_see_less,
        "rill/runtime/process/agent_client.py",
        '"""."""\nfrom rill.models.loading import load_model\n',
    ),
    (rooms_form_no_circle, "rill/telemetry/watch.py", '"""."""\nfrom rill.runtime.channel import Channel\n'),
    (nobody_imports_the_facade, "rill/training/step.py", '"""."""\nfrom rill import Channel\n'),
    (pure_packages_stay_pure, "rill/algorithms/kl.py", '"""."""\nimport transformers\n'),
    (torch_stays_out, "rill/planning/search.py", '"""."""\ndef f():\n    import torch\n'),
    (torch_stays_out, "rill/telemetry/trace.py", '"""."""\nfrom torch import Tensor\n'),
    (libraries_are_declared, "rill/training/step.py", '"""."""\nimport leftpad\n'),
    (optional_libraries_have_one_door, "rill/training/step.py", '"""."""\nimport ray\n'),
    (names_say_something, "rill/training/utils.py", '"""."""\n'),
    (names_say_something, "tests/helpers/thing.py", '"""."""\n'),
    (names_say_something, "rill/training/engine_v2.py", '"""."""\n'),
    (folders_stay_shallow, "rill/training/a/b/c.py", '"""."""\n'),
    (files_stay_small, "rill/training/step.py", '"""."""\n' + "x = 1\n" * 700),
    (functions_stay_small, "rill/training/step.py", '"""."""\ndef f():\n' + "    x = 1\n" * 80),
    (modules_say_what_they_are, "rill/training/step.py", "x = 1\n"),
    (
        nothing_is_left_unwritten,
        "rill/training/step.py",
        '"""."""\ndef f():\n    raise NotImplementedError\n',
    ),
]


@pytest.fixture
def clean_tree(tmp_path: Path) -> Path:
    for name, text in CLEAN.items():
        _plant(tmp_path, name, text)
    return tmp_path


def _plant(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_clean_tree_has_no_breach(rule: Callable[[Path], Iterator[str]], clean_tree: Path) -> None:
    assert list(rule(clean_tree)) == []


@pytest.mark.parametrize(
    ("rule", "name", "text"), PLANTED, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_planted_breach_is_found(
    rule: Callable[[Path], Iterator[str]], name: str, text: str, clean_tree: Path
) -> None:
    _plant(clean_tree, name, text)
    breaches = list(rule(clean_tree))
    assert any(Path(name).name in breach for breach in breaches), breaches


def test_every_rule_has_a_planted_breach() -> None:
    assert {rule for rule, _, _ in PLANTED} == set(RULES)


# --- the public interface ---------------------------------------------------------------------------------


def test_the_public_interface_is_this_list() -> None:
    import rill

    assert rill.__all__ == [
        "Channel",
        "Cluster",
        "Config",
        "Group",
        "Handle",
        "Message",
        "PolicyVersion",
        "Prompt",
        "RillError",
        "Sample",
        "SamplingParams",
        "StopReason",
        "Trajectory",
        "Turn",
        "Worker",
        "WorkerGroup",
        "__version__",
    ]


def test_every_public_name_can_be_imported() -> None:
    import rill

    for name in rill.__all__:
        assert getattr(rill, name) is not None


def test_an_unknown_public_name_is_an_attribute_error_that_lists_the_names() -> None:
    import rill

    with pytest.raises(AttributeError, match="Cluster"):
        rill.Clutser  # noqa: B018


def test_importing_rill_is_instant_and_pulls_in_no_library() -> None:
    code = (
        "import sys, time; start = time.process_time(); import rill; took = time.process_time() - start; "
        "heavy = {'torch', 'numpy', 'transformers', 'pydantic', 'zmq'} & set(sys.modules); "
        "assert not heavy, heavy; print(took)"
    )
    fastest_s = min(float(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT)) for _ in range(3))
    assert fastest_s < 0.05
