from __future__ import annotations

import inspect
import pickle

import pytest

from rill import errors
from rill.errors import ConfigError, RillError, RunError, UserError, WorkerError, boundary


def error_classes() -> list[type[RillError]]:
    found = [value for value in vars(errors).values() if inspect.isclass(value)]
    return [value for value in found if issubclass(value, RillError)]


def test_every_error_is_the_users_or_the_runs_and_says_what_it_is() -> None:
    for error in error_classes():
        assert error.__doc__, error
        assert error is RillError or issubclass(error, (UserError, RunError)), error


def test_the_exit_code_tells_a_wrong_input_from_a_failed_run() -> None:
    assert {error.exit_code for error in error_classes() if issubclass(error, UserError)} == {2}
    assert {error.exit_code for error in error_classes() if issubclass(error, RunError)} == {1}


def test_a_boundary_names_the_place_and_keeps_type_and_traceback() -> None:
    with pytest.raises(ConfigError) as raised, boundary("recipes/demo.toml"), boundary("trainer"):
        raise ConfigError("no such key")
    assert raised.value.__notes__ == ["in trainer", "in recipes/demo.toml"]
    assert str(raised.value) == "no such key"


def test_a_boundary_leaves_bugs_alone() -> None:
    with pytest.raises(AssertionError) as raised, boundary("here"):
        raise AssertionError
    assert not hasattr(raised.value, "__notes__")


def test_a_worker_error_survives_the_way_between_processes() -> None:
    error = WorkerError("it broke", group="rollout", rank=3, remote_traceback="line 1")
    error.add_note("at noon")
    back = pickle.loads(pickle.dumps(error))
    assert (back.group, back.rank, back.remote_traceback) == ("rollout", 3, "line 1")
    assert "rollout[3]: it broke" in str(back) and back.__notes__ == ["at noon"]
