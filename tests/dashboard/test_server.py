from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from rill.dashboard import indexer
from rill.dashboard.catalog import Catalog
from rill.dashboard.server import make_app
from rill.telemetry.run import Run
from tests.dashboard.folders import HOSTILE, small_run

PATHS = [
    "",
    "/metrics",
    "/timeline",
    "/rollouts?facets=1",
    "/group",
    "/config",
    "/guards",
    "/system",
    "/flow",
]


def client_of(
    root: Path, *, host: str = "127.0.0.1", token: str = "", folders: list[Path] | None = None
) -> TestClient:
    app = make_app(Catalog(folders or [], root), host=host, token=token)
    return TestClient(app, base_url="http://localhost")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = small_run(tmp_path)
    indexer.bring_up_to_date(run.path)
    return run


def ask(root: Path, path: str) -> Any:
    answer = client_of(root).get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_every_page_has_its_data(run: Run, tmp_path: Path) -> None:
    assert [one["key"] for one in ask(tmp_path, "/api/runs")["runs"]] == ["small"]
    head = ask(tmp_path, "/api/run/small")
    assert (head["status"], head["step"], head["num_steps"], head["indexed"]) == ("finished", 3, 3, 1.0)
    assert head["shares"] == [["training", 6.0]]
    assert len(head["card"]) == 9
    assert ask(tmp_path, "/api/run/small/metrics")["series"]["tiny"]["y"] == [1.7e-7] * 3
    assert ask(tmp_path, "/api/run/small/guards")["findings"][0]["guard"] == "lag"
    assert ["loop.steps", "3", "recipes/x.toml:4"] in ask(tmp_path, "/api/run/small/config")["rows"]
    assert ask(tmp_path, "/api/run/small/system")["series"][0]["name"] == "process/cpu"
    assert ask(tmp_path, "/api/run/small/flow") == {"flow": None, "plan": None}
    assert ask(tmp_path, "/api/run/small/prompt?id=p")["groups"][0]["step"] == 0


def test_unchanged_figures_are_not_sent_again(run: Run, tmp_path: Path) -> None:
    version = ask(tmp_path, "/api/run/small/metrics")["version"]
    assert ask(tmp_path, f"/api/run/small/metrics?version={version}") == {"version": version}


def test_a_run_that_appears_later_is_listed_and_one_that_goes_is_not(run: Run, tmp_path: Path) -> None:
    client = client_of(tmp_path)
    small_run(tmp_path, "later")
    assert [one["key"] for one in client.get("/api/runs").json()["runs"]] == ["later", "small"]
    Run(tmp_path / "later").remove()
    assert [one["key"] for one in client.get("/api/runs").json()["runs"]] == ["small"]
    assert client.get("/api/run/later").json()["problem"].startswith("there is no run 'later'")


def test_however_many_runs_there_are_each_is_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        small_run(tmp_path, f"r{number}")
    looks: list[Path] = []
    state = Run.state
    monkeypatch.setattr(Run, "state", lambda run: looks.append(run.path) or state(run))
    assert len(ask(tmp_path, "/api/runs")["runs"]) == 8
    assert len(looks) == 8


def test_two_folders_of_one_name_have_keys_of_their_own(tmp_path: Path) -> None:
    folders = [small_run(tmp_path / side).path for side in ("a", "b")]
    keys = [one["key"] for one in client_of(tmp_path, folders=folders).get("/api/runs").json()["runs"]]
    assert keys == ["small", "small~2"]


@pytest.mark.parametrize("path", PATHS)
def test_broken_files_show_what_is_there(run: Run, tmp_path: Path, path: str) -> None:
    for file in [
        *filter(Path.is_file, run.path.glob("*.*")),
        *run.path.glob("trace/*.jsonl"),
        *run.path.glob("rollouts/*.jsonl"),
    ]:
        with file.open("ab") as out:
            out.write(b'\xff{"broken": \n{"of": "another version"}\n[]\n{"step": 9, "val')
    (run.path / "flow.json").write_text("{nothing")
    (run.path / "plan.json").write_text("[]")
    indexer.bring_up_to_date(run.path)
    answer = client_of(tmp_path).get(f"/api/run/small{path}")
    assert answer.status_code == 200
    if path == "/flow":
        assert "cannot be read" in answer.json()["flow"]["problem"]
    if path == "/metrics":
        assert answer.json()["steps"] == [1, 2, 3]
    if path.startswith("/rollouts"):
        assert answer.json()["total"] == 2


@pytest.mark.parametrize("path", PATHS)
def test_an_empty_run_folder_is_no_error(tmp_path: Path, path: str) -> None:
    Run.create("empty", root=tmp_path).close()
    expected = 404 if path == "/group" else 200
    assert client_of(tmp_path).get(f"/api/run/empty{path}").status_code == expected


@pytest.mark.parametrize(
    "path",
    [
        "/timeline?from=nan", "/timeline?columns=many", "/rollouts?min=1e999", "/rollouts?order=best;drop",
        "/span?process=-1&offset=0", "/span?process=0&offset=99999999999999999999", "/group?log=7", "/media/x.png",
    ],
)  # fmt: skip
def test_a_bad_question_is_answered_in_words(run: Run, tmp_path: Path, path: str) -> None:
    answer = client_of(tmp_path).get(f"/api/run/small{path}")
    assert answer.status_code == 404
    assert answer.json()["problem"]


@pytest.mark.parametrize(
    "path",
    [
        "/api/run/..", "/api/run/%2e%2e/config", "/api/run/..%2Fsmall/config", "/api/run/%2Fetc/config",
        "/static/..%2Fserver.py", "/static/../server.py", "/static/build.json",
        "/api/run/small/media/../status.json", "/api/run/small/media/..%2Fstatus.json",
        "/api/run/small/media/%2Fetc%2Fpasswd", "/api/run/small/media/a.html", "/api/run/small/media/out.png",
        "/api/run/small/media/dir/out.png", "/api/run/small/media/%00.png",
    ],
)  # fmt: skip
def test_nothing_outside_the_run_folders_is_handed_out(run: Run, tmp_path: Path, path: str) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    (run.path / "media").mkdir()
    (run.path / "media" / "a.html").write_text("<script></script>")
    (run.path / "media" / "out.png").symlink_to(tmp_path / "secret.png")
    (run.path / "media" / "dir").symlink_to(tmp_path)
    answer = client_of(tmp_path).get(path)
    assert answer.status_code == 404
    assert b"secret" not in answer.content


def test_links_out_of_the_folder_are_not_followed(run: Run, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    small_run(outside, "hidden")
    (run.path.parent / "linked").symlink_to(outside / "hidden")
    root = tmp_path / "root"
    root.mkdir()
    (root / "linked").symlink_to(outside / "hidden")
    assert client_of(root).get("/api/runs").json()["runs"] == []
    for name in ("trace/x.jsonl", "rollouts/x.jsonl"):
        (run.path / name).symlink_to(outside / "hidden" / "metrics.jsonl")
    for name in ("flow.json", "log.txt", "guards.jsonl", "config.toml"):
        (run.path / name).unlink(missing_ok=True)
        (run.path / name).symlink_to(outside / "hidden" / "status.json")
    assert all(not path.name.startswith("x") for path in indexer.logs_of(run.path, "trace"))
    assert "problem" in ask(tmp_path, "/api/run/small/flow")["flow"]
    assert ask(tmp_path, "/api/run/small/guards") == {"findings": [], "log": ""}
    assert ask(tmp_path, "/api/run/small/config")["rows"] == []


def test_pictures_of_rollouts_are_handed_out_with_their_kind(run: Run, tmp_path: Path) -> None:
    (run.path / "media" / "step 1").mkdir(parents=True)
    (run.path / "media" / "step 1" / "a.png").write_bytes(b"\x89PNG")
    answer = client_of(tmp_path).get("/api/run/small/media/step%201/a.png")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "image/png")
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_page_may_run_its_own_script_only(run: Run, tmp_path: Path) -> None:
    policy = client_of(tmp_path).get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy


def test_model_text_leaves_as_data(run: Run, tmp_path: Path) -> None:
    answer = client_of(tmp_path).get("/api/run/small/group?log=0&place=0")
    assert answer.headers["content-type"] == "application/json"
    assert "".join(answer.json()["samples"][1]["tokens"][2:]) == HOSTILE


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_it_only_reads(run: Run, tmp_path: Path, method: str) -> None:
    assert client_of(tmp_path).request(method, "/api/runs").status_code == 405


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8765", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8765", 200),
        ("evil.example", 403),
        ("10.0.0.1", 403),
        ("", 403),
    ],
)
def test_bound_here_it_answers_to_local_names_only(run: Run, tmp_path: Path, host: str, status: int) -> None:
    assert client_of(tmp_path).get("/api/runs", headers={"host": host}).status_code == status


def test_bound_elsewhere_it_wants_its_token_once(run: Run, tmp_path: Path) -> None:
    client = client_of(tmp_path, host="0.0.0.0", token="s3cret")
    for path in ("/", "/api/runs", "/static/app.js", "/api/runs?token=s3cret", "/?token=wrong"):
        assert client.get(path).status_code == 401, path
    first = client.get("/?token=s3cret", follow_redirects=False)
    assert (first.status_code, first.headers["location"]) == (303, "/")
    cookie = first.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert client.get("/api/runs").status_code == 200


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_indexed_elsewhere(run: Run) -> None:
    run.path.chmod(0o500)
    try:
        assert run.path not in indexer.index_folder(run.path).parents
    finally:
        run.path.chmod(0o700)
