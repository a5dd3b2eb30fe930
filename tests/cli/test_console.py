from __future__ import annotations

import sys

import pytest

from rill.cli.console import complain, say_table


def test_a_table_is_aligned_lines_when_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    say_table(["run", "status"], [["a-long-name", "ok"], ["b", "failed"]])
    assert capsys.readouterr().out == "run          status\na-long-name  ok\nb            failed\n"


def test_a_table_is_rich_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    say_table(["run"], [["[red]not markup[/red]"]])
    out = capsys.readouterr().out
    assert "─" in out
    assert "[red]not markup[/red]" in out


def test_complaints_go_to_standard_error_with_their_notes(capsys: pytest.CaptureFixture[str]) -> None:
    error = ValueError("x")
    error.add_note("in the trainer")
    complain("error: x", error)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: x\n  in the trainer\n"
