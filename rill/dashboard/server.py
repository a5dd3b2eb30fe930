"""The dashboard's server: static files and JSON made from run folders. Read-only, stateless, bound to this machine.

Routes (all GET):

    /                               the page
    /static/…                       its script and style
    /api/runs                       the runs there are
    /api/run/KEY                    one run's head         …/metrics …/timeline …/span …/rollouts …/group …/prompt
                                                           …/config …/guards …/system …/flow …/media/NAME

Bound to a loopback address it answers requests for a loopback host name only, so no other web page can reach it by a
name of its own (DNS rebinding). Bound elsewhere it wants the token of its address, kept in a cookie after the first
visit. Model text leaves as JSON, under a content policy that runs nothing but the page's own script.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable
from importlib import resources
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rill.dashboard import indexer, pages
from rill.dashboard.catalog import Catalog
from rill.dashboard.media import media_file
from rill.dashboard.rollouts import Query, Rollouts
from rill.dashboard.table import Count, Whole
from rill.dashboard.timeline import View
from rill.errors import UserError
from rill.telemetry.run import Run

Q = TypeVar("Q")
COOKIE = "rill_token"
STATIC = {"app.js": "text/javascript; charset=utf-8", "app.css": "text/css; charset=utf-8"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def make_app(catalog: Catalog, *, host: str = "127.0.0.1", token: str = "") -> ASGIApp:
    """`token` is required from every visitor when it is not empty."""
    answers = _Answers(catalog)
    one_run: dict[str, Callable[[Request], Any]] = {
        "": answers.overview,
        "/metrics": answers.metrics,
        "/timeline": answers.timeline,
        "/span": answers.span,
        "/rollouts": answers.rollouts,
        "/group": answers.group,
        "/prompt": answers.prompt,
        "/media/{name:path}": answers.media,
        **{
            f"/{page.__name__}": answers.of(page)
            for page in (pages.config, pages.guards, pages.system, pages.flow)
        },
    }
    routes = [
        Route("/", _page),
        Route("/static/{name}", _static),
        Route("/api/runs", _json(answers.runs)),
        *(Route(f"/api/run/{{key}}{path}", _json(answer)) for path, answer in one_run.items()),
    ]
    return _Door(Starlette(routes=routes), host=host, token=token)


class _Answers:
    """One method a route. They read files and return plain data, or a file; Starlette calls them in its threads."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def runs(self, request: Request) -> Any:
        """The runs; of those that the page shows, also how much of their logs is indexed."""
        found, watched = [], request.query_params.get("watch", "").split(",")
        for key, path in self._catalog.runs().items():
            try:
                run = Run(path)
                indexed = round(indexer.progress(run.path), 4) if key in watched else None
                found.append(self._catalog.summary(key, run) | {"indexed": indexed})
            except OSError:
                continue  # gone since it was listed, or not readable for this user
        return {"root": str(self._catalog.root), "runs": found}

    def overview(self, request: Request) -> Any:
        return pages.overview(self._catalog, request.path_params["key"])

    def metrics(self, request: Request) -> Any:
        figures = self._catalog.figures(self._run(request))
        if _asked(request, _Asked).version == figures.version:
            return {"version": figures.version}
        return figures.columns

    def timeline(self, request: Request) -> Any:
        return pages.timeline(self._run(request)).view(_asked(request, View))

    def span(self, request: Request) -> Any:
        asked = _asked(request, _Asked)
        return pages.timeline(self._run(request)).span(asked.process, asked.offset)

    def rollouts(self, request: Request) -> Any:
        rollouts = self._rollouts(request)
        answer = rollouts.find(_asked(request, Query))
        return answer | {"facets": rollouts.facets()} if "facets" in request.query_params else answer

    def group(self, request: Request) -> Any:
        asked = _asked(request, _Asked)
        return self._rollouts(request).group(asked.log, asked.place)

    def prompt(self, request: Request) -> Any:
        return {"groups": self._rollouts(request).prompt(_asked(request, _Asked).id)}

    def of(self, page: Callable[[Run], Any]) -> Callable[[Request], Any]:
        return lambda request: page(self._run(request))

    def media(self, request: Request) -> Response:
        path, kind = media_file(self._run(request).path, request.path_params["name"])
        return FileResponse(path, media_type=kind)

    def _run(self, request: Request) -> Run:
        return self._catalog.open(request.path_params["key"])

    def _rollouts(self, request: Request) -> Rollouts:
        return indexer.rollouts(self._run(request).path)


class _Door:
    """Who may ask what, before anything is looked at; and the headers of every answer."""

    def __init__(self, app: ASGIApp, *, host: str, token: str) -> None:
        self._app = app
        self._is_local = is_loopback(host)
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *extra]
            await send(message)

        refused = self._refuse(Request(scope))
        await (refused or self._app)(scope, receive, send_with_headers)

    def _refuse(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD"):
            return _problem(405, "the dashboard only reads")
        if self._is_local and not is_loopback(_host_name(request.headers.get("host", ""))):
            return _problem(403, "this dashboard answers to localhost only")
        if not self._token:
            return None
        given = request.query_params.get("token")
        if given is not None and request.url.path == "/":
            if not _equal(given, self._token):
                return _problem(401, "this token is not the dashboard's: use the address that it printed")
            answer = RedirectResponse("/", status_code=303)
            answer.set_cookie(COOKIE, self._token, httponly=True, samesite="strict", max_age=7 * 86400)
            return answer
        if not _equal(request.cookies.get(COOKIE, ""), self._token):
            return _problem(401, "this dashboard wants a token: use the address that it printed")
        return None


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def page_html() -> str:
    return resources.files("rill.dashboard").joinpath("static/index.html").read_text(encoding="utf-8")


def static_text(name: str) -> str:
    return resources.files("rill.dashboard").joinpath(f"static/{name}").read_text(encoding="utf-8")


def _page(request: Request) -> Response:
    return Response(page_html(), media_type="text/html; charset=utf-8")


def _static(request: Request) -> Response:
    kind = STATIC.get(request.path_params["name"])
    if kind is None:
        return _problem(404, "there is no such file")
    return Response(static_text(request.path_params["name"]), media_type=kind)


def _json(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
    def respond(request: Request) -> Response:
        try:
            found = answer(request)
        except UserError as error:
            return _problem(404, str(error))
        except OSError as error:
            return _problem(503, f"the run's files cannot be read: {error.strerror or error}")
        if isinstance(found, Response):
            return found
        return Response(msgspec.json.encode(found), media_type="application/json")

    return respond


def _problem(status: int, words: str) -> Response:
    return Response(msgspec.json.encode({"problem": words}), status, media_type="application/json")


def _host_name(header: str) -> str:
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0]


def _equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())


class _Asked(msgspec.Struct, kw_only=True):
    """What the smaller questions name."""

    version: Whole = -1
    process: Count = 0
    offset: Count = 0
    log: Count = 0
    place: Count = 0
    id: str = ""


def _asked(request: Request, kind: type[Q]) -> Q:
    """The question in the address; what it leaves empty is as if it were not there."""
    given = {name: text for name, text in request.query_params.items() if text}
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UserError(f"this question cannot be understood: {error}") from None
