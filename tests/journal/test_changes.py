"""Resuming with other settings: what follows is said, or it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rill.errors import UserError
from rill.journal.changes import accept
from rill.journal.token_log import FOLDER

BEFORE = {"workflow": "grpo", "model": {"path": "a"}, "loop": {"steps": 4, "max_lag": 0}, "seed": 1}


def test_where_and_how_long_it_runs_may_change_and_the_token_log_is_used(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    after = {**BEFORE, "loop": {"steps": 9, "max_lag": 0}}
    assert accept(tmp_path, BEFORE, after) == (["changed: loop.steps = 9, was 4"], False)


def test_what_bears_on_sampling_sets_the_token_log_aside_and_says_so(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    lines, is_stale = accept(tmp_path, BEFORE, {**BEFORE, "seed": 2})
    assert lines[0] == "changed: seed = 2, was 1" and "sampled anew" in lines[1]
    assert is_stale and (tmp_path / FOLDER).exists(), "its driver does it, who holds the run"


def test_another_model_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    with pytest.raises(UserError, match=r"model.path = 'b' does not fit .* made with 'a'"):
        accept(tmp_path, BEFORE, {**BEFORE, "model": {"path": "b"}, "seed": 2})
    assert (tmp_path / FOLDER).exists()
