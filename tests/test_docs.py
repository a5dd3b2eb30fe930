"""The documentation against the tree: links lead somewhere, pages are listed, programs run, commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rill.cli.main import COMMANDS, app
from rill.envs.rewards.base import REWARDS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").glob("*.md")])


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", without_code(page.read_text(encoding="utf-8"))):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, (
            f"docs/index.md does not list {page.name}"
        )


def test_the_map_names_every_room() -> None:
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    for folder in sorted((ROOT / "rill").iterdir()):
        if (folder / "__init__.py").exists():
            assert f"\n  {folder.name}/ " in page, f"docs/design.md has no line for rill/{folder.name}/"


def test_every_test_that_the_design_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/design.md").read_text(encoding="utf-8")))
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))
    }
    assert named
    assert not named - there


def test_every_command_is_documented() -> None:
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"`rill {name}" in page, f"docs/cli.md does not mention rill {name}"


def programs_of_the_readme() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def test_the_workflow_in_the_readme_is_the_real_one() -> None:
    workflow = programs_of_the_readme()[0]
    assert "def step(self" in workflow
    assert workflow in (ROOT / "rill/workflows/grpo.py").read_text(encoding="utf-8")


def test_the_program_in_the_readme_runs(tmp_path: Path) -> None:
    _, program = programs_of_the_readme()
    path = tmp_path / "program.py"
    path.write_text(program)
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout == "[0, 2, 4, 6, 8, 10, 12, 14, 16, 18]\n", done.stderr


def test_the_task_of_the_ten_minutes_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/ten_minutes.md").read_text(encoding="utf-8")
    [script] = re.findall(r"python -c '\n(.*?)' > largest.jsonl", page, re.DOTALL)
    rows = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    (tmp_path / "largest.jsonl").write_text(rows.stdout)
    [reward] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_reward.py").write_text(reward)
    (tmp_path / "recipes").mkdir()
    [recipe] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "recipes" / "largest.toml").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RILL_CACHE", str(tmp_path / "cache"))
    result = CliRunner().invoke(app, ["config", "check", "largest"])
    assert result.output == "recipes/largest.toml: valid\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_piece_of_a_recipe_is_toml(page: Path) -> None:
    for piece in re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        tomllib.loads(piece)


def test_the_rewards_of_the_page_about_them_are_valid() -> None:
    page = (ROOT / "docs/envs.md").read_text(encoding="utf-8")
    shown = [tomllib.loads(piece) for piece in re.findall(r"```toml\n(.*?)```", page, re.DOTALL)]
    rewards = [piece["rollout"]["env"]["reward"] for piece in shown]
    assert {reward["type"] for reward in rewards} >= {"mix", "judge", "code"}
    for reward in rewards:
        REWARDS.load(reward["type"]).Config.model_validate(reward)
