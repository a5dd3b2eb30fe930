"""The command `rill`: a table of commands, each imported when it is called, and the boundary where errors end.

    rill --help              imports no command, so it answers at once
    rill COMMAND ...         imports rill.cli.COMMAND and runs its `app`

A RillError becomes one message and its exit code (2: the input is wrong; 1: the run met something, a full disk for
instance); Ctrl-C becomes a message that says how to go on and exit code 130. Everything else is a bug and keeps its
traceback.

To add a command: a file `rill/cli/NAME.py` with a `typer.Typer` called `app`, and a line in COMMANDS.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from rill.cli.console import Commands, complain
from rill.errors import (
    CheckpointError,
    GuardError,
    RillError,
    RunError,
    TrainingError,
    UserError,
    WorkerError,
    first_found,
)
from rill.registry import load_target

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("rill.cli.train:app", "Train a model from a recipe, or resume a run"),
    "recipes": ("rill.cli.recipes:app", "List the runs that can be started, or copy one"),
    "config": ("rill.cli.config:app", "Show a resolved configuration and where each value came from"),
    "eval": ("rill.cli.eval:app", "Evaluate a run's model, or any other, on a task"),
    "plan": ("rill.cli.plan:app", "Find which worker should run on which devices, from a profile"),
    "simulate": ("rill.cli.simulate:app", "Simulate a workflow on a cluster of any size"),
    "report": ("rill.cli.report:app", "Write a run's curves, timeline and rollouts as one HTML page"),
    "dashboard": ("rill.cli.dashboard:app", "Look at runs in a browser: curves, timeline, rollouts, guards"),
    "runs": ("rill.cli.runs:app", "List runs with their status, steps and reward; look into one"),
    "engine": ("rill.cli.engine:app", "Let engines join or leave a run that is running"),
    "chaos": ("rill.cli.chaos:app", "Hurt a run at random and check that nothing is lost"),
    "serve": ("rill.cli.serve:app", "Serve a model over the OpenAI API"),
    "chat": ("rill.cli.chat:app", "Chat with a run's model, or any other, in the terminal"),
    "push": ("rill.cli.push:app", "Upload a run's model to the Hugging Face hub"),
    "doctor": (
        "rill.cli.doctor:app",
        "Check whether this machine is ready, or what is wrong with a run, and what to do",
    ),
}
"""name -> (where its Typer app is, what it does)"""

INTERRUPTED = 130
DISK_TROUBLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
"""Trouble with the machine that no part of rill could have foreseen; no bug either."""
PATH_TROUBLE = frozenset(
    {errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}
)
"""A file or folder that was named and cannot be used so."""
SETTING = re.compile(r"--([A-Za-z_]\w*(?:\.\w+)+)(?:=(.*))?", re.DOTALL)
"""As others have it on the command line; options of rill's have no dot in their name."""


class CommandTable(Commands):
    """A group whose commands are listed from COMMANDS and imported only when one is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # Enough of each command to be listed and suggested; `resolve_command` brings the real one.
        for name, (_, summary) in COMMANDS.items():
            self.add_command(TyperCommand(name=name, help=summary))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, listed, rest = super().resolve_command(ctx, args)
        if name is None or listed is None:
            return name, listed, rest
        if setting := next(filter(None, map(SETTING.fullmatch, rest)), None):
            raise UserError(f"{setting[0]}: a setting has no dashes: {setting[1]}={setting[2] or 'VALUE'}")
        return name, typer.main.get_command(load_target(COMMANDS[name][0])), rest

    def invoke(self, ctx: Any) -> Any:
        is_debug = ctx.params["debug"] or os.environ.get("RILL_DEBUG", "") not in ("", "0")
        try:
            return super().invoke(ctx)
        except RillError as error:
            if is_debug:
                traceback.print_exc()
            message, exit_code = explain(error)
            complain(f"error: {message}", error)
            raise typer.Exit(exit_code) from None
        except OSError as error:
            if error.errno in PATH_TROUBLE and error.filename is not None:
                complain(f"error: {error.filename}: {error.strerror}", error)
                raise typer.Exit(UserError.exit_code) from None
            if error.errno not in DISK_TROUBLE:
                raise
            complain(f"error: {error}: make room, or write elsewhere (--root FOLDER)", error)
            raise typer.Exit(RunError.exit_code) from None
        except KeyboardInterrupt as interrupt:
            if is_debug:
                traceback.print_exc()
            complain("interrupted", interrupt)
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=CommandTable,
    name="rill",
    add_completion=True,
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks of errors as well (also RILL_DEBUG=1).")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=lambda on: _version(on)
        ),
    ] = False,
) -> None:
    """Reinforcement-learning post-training: write the workflow once, run it from a laptop to a cluster.

    \b
    Examples:
      rill train demo                             a first result in minutes
      rill recipes                                which runs can be started
      rill config show demo loop.steps=20         what exactly a run would do
      rill runs                                   the status of every run
      rill doctor                                 is this machine ready?
    """


def explain(error: RillError) -> tuple[str, int]:
    """The message and the exit code. What is said in words needs no traceback, even if a worker found it."""
    found = first_found(error)
    cause = found.__cause__
    if isinstance(found, WorkerError) and isinstance(
        cause, UserError | TrainingError | CheckpointError | GuardError
    ):
        return f"{cause} (found by {found.group}[{found.rank}])", cause.exit_code
    return str(error), error.exit_code


def main() -> None:
    """The entry point of the `rill` script. As with `python -m`, modules of the current folder can be named."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    app(prog_name="rill")


def _version(is_asked: bool) -> None:
    if is_asked:
        from rill import __version__

        typer.echo(f"rill {__version__}")
        raise typer.Exit


if __name__ == "__main__":
    main()
