from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from rill.telemetry.requests import FOLDER, Request, answer_all, open_requests


def test_what_is_no_request_or_cannot_be_answered_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_requests(tmp_path)
    until_s = time.time() + 60
    for name, content in enumerate(
        ({"until_s": until_s}, {"until_s": "soon"}, {"until_s": until_s, "more": 1}, [])
    ):
        (tmp_path / FOLDER / f"{name}.json").write_text(json.dumps(content))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rill.telemetry.requests.write_atomically", full)
    asked: list[Request] = []

    def act(request: Request) -> str:
        asked.append(request)
        return "done"

    answer_all(tmp_path, act)
    assert asked[0] == Request(until_s=until_s)
    assert list((tmp_path / FOLDER).iterdir()) == []
