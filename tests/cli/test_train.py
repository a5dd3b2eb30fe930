"""What `rill train` decides before it drives anything: start, resume, or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rill.cli.main import app
from rill.telemetry.run import Run

TINY = str(Path(__file__).parents[1] / "e2e" / "tiny.toml")


@pytest.fixture
def driven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The runs that would be driven: (name, is it resumed). Each is interrupted at once."""
    monkeypatch.chdir(tmp_path)
    found: list[tuple[str, bool]] = []

    def carry_out(
        config: Any, run: Run, recipe: str, *, changed_config: str | None = None, is_log_stale: bool = False
    ) -> None:
        found.append((run.name, changed_config is not None))
        run.close()

    monkeypatch.setattr("rill.cli.driver.carry_out", carry_out)
    return found


def train(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["train", *arguments])
    assert result.exit_code == exit_code, result.output
    return result.output


def test_the_same_command_starts_a_run_and_resumes_it(driven: list[tuple[str, bool]]) -> None:
    command = (TINY, "loop.steps=3", "--name", "job", "--resume", "auto")
    train(*command)
    train(*command)
    assert driven == [("job", False), ("job", True)]
    with Run.resume("job").running():
        pass  # it comes to its end
    assert "has finished: nothing to resume" in train(*command)
    assert len(driven) == 2


def test_resuming_automatically_needs_to_know_what(driven: list[tuple[str, bool]]) -> None:
    assert "needs the recipe" in train("--resume", "auto", exit_code=2)


def test_resuming_automatically_does_not_begin_anew_beside_what_is_no_run(
    driven: list[tuple[str, bool]],
) -> None:
    Path("runs/job").mkdir(parents=True)
    command = (TINY, "--name", "job", "--resume", "auto")
    Path("runs/job/slurm.log").touch()
    assert "runs/job is there and is no run" in train(*command, exit_code=2)
    Path("runs/job/slurm.log").unlink()
    train(*command)
    assert driven == [("job", False)]


def test_a_recipe_beside_a_run_to_resume_is_said_to_be_one_too_many(driven: list[tuple[str, bool]]) -> None:
    train(TINY, "--name", "job")
    assert "leave 'demo' out" in train("demo", "--resume", "job", exit_code=2)
    train("loop.steps=9", "--resume", "job")
    assert driven == [("job", False), ("job", True)]


def test_a_mistake_leaves_no_folder_behind(driven: list[tuple[str, bool]]) -> None:
    said = train(TINY, "data.type=jsonl", "data.path=nowhere.jsonl", exit_code=2)
    assert "there is no file 'nowhere.jsonl'" in said
    assert not driven and not Path("runs").exists()
