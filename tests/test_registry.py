from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rill.errors import UnknownNameError
from rill.registry import Registry, load_target


def registry() -> Registry:
    return Registry("shape", {"decoder": "json:JSONDecoder", "encoder": "json:JSONEncoder"})


def test_a_name_is_imported_only_when_it_is_loaded() -> None:
    sys.modules.pop("this_is_not_a_module", None)
    parts = Registry("shape", {"broken": "this_is_not_a_module:Thing", "decoder": "json:JSONDecoder"})
    assert list(parts) == ["broken", "decoder"]
    assert parts.load("decoder").__name__ == "JSONDecoder"


def test_an_unknown_name_lists_the_valid_ones_and_suggests_the_nearest() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown shape 'decodr' \(did you mean 'decoder'\?\): valid are decoder, enc"
    ):
        registry().load("decodr")
    with pytest.raises(UnknownNameError, match="valid are"):
        registry()["zzz"]


def test_a_target_may_stand_in_place_of_a_name() -> None:
    assert registry().load("json:JSONDecoder").__name__ == "JSONDecoder"


def test_parts_can_be_added_but_not_replaced() -> None:
    parts = registry()
    parts.register("path", "pathlib:Path")
    parts.register("path", "pathlib:Path")
    assert "path" in parts
    assert len(parts) == 3
    with pytest.raises(UnknownNameError, match=r"taken by json:JSONDecoder"):
        parts.register("decoder", "pathlib:Path")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("json", "not of the form"),
        (":Thing", "not of the form"),
        ("no_such_module:Thing", "no module 'no_such_module'"),
        ("json:JSONDecodr", "did you mean 'JSONDecoder'"),
    ],
)
def test_a_target_that_cannot_be_loaded_says_why(target: str, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        load_target(target)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import a_library_nobody_has\n", r":1: ModuleNotFoundError: .*a_library_nobody_has"),
        ("x = 1\ny = x / 0\n", r":2: ZeroDivisionError"),
        ("def f(:\n", r":1: SyntaxError"),
    ],
)
def test_a_module_that_fails_while_it_is_imported_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, words: str
) -> None:
    (tmp_path / "fails_at_import.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnknownNameError, match=r"cannot be imported: .*fails_at_import.py" + words):
        load_target("fails_at_import:Thing")
