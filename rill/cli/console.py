"""How commands write: tables on a terminal, plain aligned lines anywhere else, complaints on standard error."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup


class Commands(TyperGroup):
    """A group whose help lists what each command does in a whole sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            first = " ".join((command.help or "").partition("\n\n")[0].split()) if command else ""
            rows.append((name, first.partition(". ")[0].rstrip(".")))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def say(text: str = "") -> None:
    """One line on standard output; its colours reach a terminal only."""
    typer.echo(text)


def say_paged(lines: Iterable[str]) -> None:
    """Many lines: through the pager on a terminal that they do not fit, as they are anywhere else."""
    shown = list(lines)
    num_rows = sum(line.count("\n") + 1 for line in shown)
    if not sys.stdout.isatty() or num_rows < shutil.get_terminal_size().lines:
        for line in shown:
            say(line)
        return
    from rich.console import Console
    from rich.text import Text

    os.environ.setdefault("LESS", "-RFX")  # colours, and nothing cleared at the end
    console = Console()
    with console.pager(styles=True):
        for line in shown:
            console.print(Text.from_ansi(line), soft_wrap=True)


def say_json(value: Any) -> None:
    """For programs: JSON on standard output."""
    typer.echo(json.dumps(value, indent=2, default=str))


def complain(message: str, error: BaseException | None = None) -> None:
    """A message, with the notes that an error gathered on its way, on standard error."""
    typer.echo(message, err=True)
    if error is not None and hasattr(error, "__notes__"):
        for note in error.__notes__:
            typer.echo(f"  {note}", err=True)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """A sign of life while something takes seconds, on a terminal only; it leaves nothing behind."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield


def say_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, styles: dict[str, str] | None = None
) -> None:
    """A table. `styles` colours whole cells by their text, on a terminal only."""
    if sys.stdout.isatty():
        _say_rich_table(columns, rows, styles or {})
        return
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    for row in [columns, *rows]:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def _say_rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]], styles: dict[str, str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=styles.get(cell, "")) for cell in row))
    Console().print(table)
