"""The command as a user meets it: a process with a terminal or a pipe, exit codes and messages."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rill.cli.main import COMMANDS, app, explain
from rill.errors import TrainingError, UnknownNameError, UserError, WorkerError
from rill.registry import load_target
from rill.telemetry.run import Run
from tests import child

DEADLINE_S = 240
ROOT = Path(__file__).resolve().parents[2]


def rill(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rill.cli.main", *arguments],
        cwd=cwd,
        env=child.environment(**environment),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with a recipe of a small workflow that is not rill's own."""
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "small.toml").write_text(
        "# A small run\nworkflow = 'tests.config.parts:SmallWorkflow'\nsteps = 3\n\n[trainer]\nlearning_rate = 0.1\n"
    )
    return tmp_path


def test_help_lists_every_command_without_importing_one(tmp_path: Path) -> None:
    done = rill("--help", cwd=tmp_path)
    assert done.returncode == 0
    for name in COMMANDS:
        assert f"\n  {name} " in done.stdout
    code = (
        "import sys; from rill.cli.main import COMMANDS, app\n"
        "def ask(*words):\n"
        "    try: app([*words, '--help'])\n"
        "    except SystemExit: pass\n"
        "ask(); loaded = {'numpy', 'rill.cli.doctor', 'rill.cli.config'} & set(sys.modules)\n"
        "for name in COMMANDS: ask(name)\n"
        "loaded |= {'torch', 'transformers', 'httpx', 'rill.inference.server', 'rill.workflows.config'}"
        " & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, timeout=DEADLINE_S, capture_output=True
    )


@pytest.mark.parametrize("command", ["chat", "serve", "eval"])
def test_a_model_that_nobody_knows_is_told_before_anything_heavy_is_imported(
    tmp_path: Path, command: str
) -> None:
    code = (
        "import sys; from rill.cli.main import main\n"
        f"sys.argv = ['rill', {command!r}, 'nobody']\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 2, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    env = child.environment()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=env,
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "'nobody'" in done.stderr


def _pages(name: str) -> list[tuple[str, ...]]:
    """A command, and those inside it."""
    command: Any = typer.main.get_command(load_target(COMMANDS[name][0]))
    return [(name,), *((name, inner) for inner in getattr(command, "commands", ()))]


@pytest.mark.parametrize("page", [page for name in COMMANDS for page in _pages(name)], ids=" ".join)
def test_every_command_has_help_with_an_example(page: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*page, "--help"], prog_name="rill")
    assert done.exit_code == 0
    assert "Example" in done.stdout
    assert f"rill {' '.join(page)}" in done.stdout
    assert "..." not in done.stdout.partition("Commands:")[2], "what a command does is said whole"


@pytest.mark.parametrize("words", [["--loop.steps=5"], ["--loop.steps", "5"]])
def test_a_setting_with_dashes_is_told_how_it_is_written(words: list[str]) -> None:
    done = CliRunner().invoke(app, ["train", "demo", *words])
    assert done.exit_code == UserError.exit_code
    assert "a setting has no dashes: loop.steps=" in done.stderr


def test_the_version_is_the_packages(tmp_path: Path) -> None:
    from rill import __version__

    assert rill("--version", cwd=tmp_path).stdout == f"rill {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config", "show", "smal"], "unknown recipe 'smal' (did you mean 'small'?)"),
        (["config", "show", "recipes/none.toml"], "there is no recipe file recipes/none.toml"),
        (["config", "show", "broken.toml"], "broken.toml is not valid TOML"),
        (
            ["config", "show", "small", "trainer.learning_rte=1"],
            "command line: trainer.learning_rte = 1: unknown key (did you mean 'learning_rate'?)",
        ),
        (["config", "show", "small", "steps=many"], 'command line: steps = "many": expected a whole number'),
        (["config", "show", "small", "steps"], "'steps' is not KEY=VALUE"),
        (
            ["config", "show", "small", "workflow=grp"],
            "unknown workflow 'grp' (did you mean 'grpo'?)",
        ),
        (["config", "show", "empty.toml"], "missing the key `workflow`"),
        (
            ["config", "check", "wrong.toml"],
            'wrong.toml:3: trainer.learning_rate = "fast": expected a number',
        ),
        (["recipes", "copy", "nothing", "mine"], "unknown recipe 'nothing'"),
        (["runs", "show", "nothing"], "there is no run 'nothing'"),
        (["confg"], "Did you mean 'config'?"),
        (["config", "show"], "Missing argument"),
        (["runs", "--rot", "x"], "No such option"),
    ],
)
def test_a_wrong_input_gives_one_message_exit_code_2_and_no_traceback(
    arguments: list[str], message: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace)
    (workplace / "broken.toml").write_text("a = = 1\n")
    (workplace / "empty.toml").write_text("")
    (workplace / "wrong.toml").write_text(
        "workflow = 'tests.config.parts:SmallWorkflow'\nsteps = 1\ntrainer.learning_rate = 'fast'\n"
    )
    done = CliRunner().invoke(app, arguments, prog_name="rill")
    assert message in done.stderr, done.stderr
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit), "anything else would be shown as a traceback"
    assert done.stdout == ""


FAILING_COMMAND = """
import typer
from rill.cli import main
from rill.errors import MissingExtraError, RunError, boundary

app = typer.Typer()

@app.command()
def fail(how: str):
    with boundary("the trainer"):
        if how == "extra":
            raise MissingExtraError('the wandb sink needs wandb: pip install "rill[trackers]"')
        if how == "run":
            raise RunError("the disk is full")
        if how == "disk":
            open("/dev/full", "w").write("x" * 100_000)
        if how == "bug":
            raise AssertionError("our own mistake")
        if how == "sleep":
            import time
            from rill.telemetry.run import Run
            with Run.create("demo").running():
                print("started", flush=True)
                time.sleep(60)

main.COMMANDS["fail"] = ("__main__:app", "Fail")
main.app = typer.Typer(cls=main.CommandTable, pretty_exceptions_enable=False)
main.app.callback()(main.root)
main.app(prog_name="rill")
"""


def failing(how: str, cwd: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", FAILING_COMMAND, *options, "fail", how],
        cwd=cwd,
        env=child.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )


def test_a_missing_extra_gives_the_install_line_and_where_it_happened(tmp_path: Path) -> None:
    process = failing("extra", tmp_path)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2
    assert stderr.splitlines() == [
        'error: the wandb sink needs wandb: pip install "rill[trackers]"',
        "  in the trainer",
    ]


def test_a_failed_run_ends_with_1_and_debug_shows_the_traceback(tmp_path: Path) -> None:
    process = failing("run", tmp_path, "--debug")
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "Traceback" in stderr
    assert "error: the disk is full" in stderr


def test_a_full_disk_is_said_in_one_line(tmp_path: Path) -> None:
    process = failing("disk", tmp_path)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "No space left on device: make room" in stderr and "Traceback" not in stderr


@pytest.mark.parametrize("trouble", [PermissionError, NotADirectoryError])
def test_a_file_that_cannot_be_used_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: type[OSError]
) -> None:
    code = errno.EACCES if trouble is PermissionError else errno.ENOTDIR

    def deny(*_: Any) -> None:
        raise trouble(code, "no way in", "rows.jsonl")

    monkeypatch.setattr("rill.cli.runs.list_runs", deny)
    result = CliRunner().invoke(app, ["runs", "--root", str(tmp_path)])
    assert (result.exit_code, result.output) == (2, "error: rows.jsonl: no way in\n")


def test_a_bug_keeps_its_traceback(tmp_path: Path) -> None:
    process = failing("bug", tmp_path)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "AssertionError: our own mistake" in stderr


def test_ctrl_c_ends_cleanly(tmp_path: Path) -> None:
    process = failing("sleep", tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert stderr.splitlines() == ["interrupted"]
    assert rill("runs", cwd=tmp_path).stdout.splitlines()[1].split()[:2] == ["demo", "interrupted"]


def test_a_reward_in_the_current_folder_is_found_and_a_misspelt_one_is_named_before_anything_starts(
    tmp_path: Path,
) -> None:
    (tmp_path / "my_rewards.py").write_text("def score(prompt, text, trajectory):\n    return 1.0\n")
    script = "from rill.cli.main import main; import sys; sys.path.remove(''); main()"  # as the installed script starts

    overrides = ["rollout.env.reward.type=function", "rollout.env.reward.function=my_rewards:skore"]
    misspelt = subprocess.run(
        [sys.executable, "-c", script, "config", "show", "demo", *overrides],
        cwd=tmp_path,
        env=child.environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert misspelt.returncode == 2
    assert "did you mean 'score'" in misspelt.stderr, "the module was found, and the name in it was not"


def test_a_users_mistake_that_a_worker_found_comes_without_its_traceback() -> None:
    error = WorkerError(
        "UnknownNameError: no such thing", group="rollout", rank=1, remote_traceback="Traceback …"
    )
    assert explain(error) == (str(error), 1)
    error.__cause__ = UnknownNameError("no such thing")
    assert explain(error) == ("no such thing (found by rollout[1])", 2)
    error.__cause__ = TrainingError("step 2: the loss (nan) is not finite")
    assert explain(error) == ("step 2: the loss (nan) is not finite (found by rollout[1])", 1)
    caller = WorkerError("WorkerError: …", group="controller", rank=0, remote_traceback="Traceback …")
    caller.__cause__ = error
    assert explain(caller) == explain(error), "however many workers it came through"


def test_a_finished_run_is_not_resumed_without_a_change(tmp_path: Path) -> None:
    with Run.create("done", root=tmp_path / "runs", config_toml="workflow = 'grpo'\n").running():
        pass
    result = rill("train", "--resume", "done", cwd=tmp_path)
    assert result.returncode == 2
    assert "has finished: to continue it, change something" in result.stderr


def test_the_shell_offers_commands_recipes_and_runs(workplace: Path) -> None:
    def offered(line: str) -> set[str]:
        asked = {"_RILL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()))}
        return set(rill(cwd=workplace, **asked).stdout.split())

    Run.create("first", root=workplace / "runs").close()
    assert {"train", "chat", "runs"} <= offered("rill ")
    assert "small" in offered("rill train ")
    assert offered("rill runs show ") == {"first"}


def test_a_run_on_another_system_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    import rill.cli.train as train

    monkeypatch.setattr(train.sys, "platform", "darwin")
    result = CliRunner().invoke(app, ["train", "demo"])
    assert result.exit_code == 2
    assert "runs need Linux" in result.output
