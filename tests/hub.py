"""A hub of the Hugging Face kind on this machine, as far as rill uses one: repositories are folders."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "0" * 39 + "1"


class FakeHub:
    """root/models/OWNER/NAME and root/datasets/OWNER/NAME, at one commit."""

    def __init__(self, root: Path, url: str) -> None:
        self.root = root
        self.url = url
        self.asked: list[str] = []

    def repo(self, kind: str, name: str) -> Path:
        folder = self.root / kind / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


@contextmanager
def fake_hub(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Until the block ends, HF_ENDPOINT and the cache are those of the test."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = FakeHub(root / "hub", f"http://127.0.0.1:{server.server_port}")
    server.hub = hub  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    from huggingface_hub import constants

    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("RILL_CACHE", str(root / "rill-cache"))
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_POST(self) -> None:
        hub: FakeHub = self.server.hub  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = urlsplit(unquote(self.path)).path
        hub.asked.append(path)
        if path == "/api/repos/create":
            name = json.loads(body)["name"]
            owner = json.loads(body).get("organization") or "me"
            hub.repo("models", f"{owner}/{name}")
            self._json({"url": f"{hub.url}/{owner}/{name}", "name": f"{owner}/{name}"})
        elif "/preupload/" in path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self._json({"files": files})
        elif "/commit/" in path:
            name = path.removeprefix("/api/models/").rpartition("/commit/")[0]
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    target = hub.repo("models", name) / entry["value"]["path"]
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(base64.b64decode(entry["value"]["content"]))
            url = f"{hub.url}/{name}/commit/{COMMIT}"
            self._json({"commitUrl": url, "commitOid": COMMIT, "pullRequestUrl": None})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        else:
            self._json({"error": f"no {path}"}, 404)

    def _answer(self, *, with_body: bool) -> None:
        hub: FakeHub = self.server.hub  # type: ignore[attr-defined]
        path = urlsplit(unquote(self.path)).path
        hub.asked.append(path)
        if "/resolve/" in path:
            repo, _, rest = path.removeprefix("/").partition("/resolve/")
            name = repo if repo.startswith("datasets/") else f"models/{repo}"
            self._file(hub.root / name / rest.partition("/")[2], with_body)
            return
        parts = path.removeprefix("/api/").split("/")
        folder = hub.root / Path(*parts[:3])
        if not folder.is_dir():
            self._json({"error": "Repository not found"}, 404, code="RepoNotFound")
            return
        if parts[3:4] in (["revision"], ["tree"]) and parts[4] not in ("main", COMMIT):
            self._json({"error": "Invalid rev id"}, 404, code="RevisionNotFound")
            return
        files = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())
        if parts[3:4] == ["tree"]:
            self._json(
                [
                    {"type": "file", "path": f, "size": (folder / f).stat().st_size, "oid": _etag(folder / f)}
                    for f in files
                ]
            )
            return
        name = "/".join(parts[1:3])
        self._json(
            {"id": name, "sha": COMMIT, "siblings": [{"rfilename": f} for f in files], "private": False}
        )

    def _file(self, path: Path, with_body: bool) -> None:
        if not path.is_file():
            self._json({"error": "Entry not found"}, 404, code="EntryNotFound")
            return
        content = path.read_bytes()
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{_etag(path)}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def _json(self, value: object, status: int = 200, code: str = "") -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base's name
        pass


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
