"""`rill dashboard`: look at runs in a browser, live or finished, from their folders alone.

this process     the server: reads indexes and small files
a child          the indexer: reads the logs, writes `.index/` beside them; ends with this process
"""

from __future__ import annotations

import getpass
import multiprocessing
import os
import secrets
import signal
import socket
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from rill.cli.arguments import RUNS, Root, run_names
from rill.cli.console import say
from rill.errors import UserError
from rill.telemetry.run import Run

app = typer.Typer(rich_markup_mode=None, add_completion=False)
DEFAULT_PORT = 8765
MAX_TRIED_PORTS = 20


@app.command()
def dashboard(
    runs: Annotated[
        list[str] | None,
        typer.Argument(help="Runs by name or folder. Default: all under --root.", autocompletion=run_names),
    ] = None,
    root: Root = RUNS,
    host: Annotated[
        str, typer.Option("--host", help="Where to listen. Elsewhere than here, a token is needed.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Default: the first free one from 8765 on.")
    ] = 0,
    token: Annotated[
        bool, typer.Option("--token", help="Want a token on this machine too, where others have accounts.")
    ] = False,
    browser: Annotated[bool, typer.Option("--open", help="Open a browser.")] = False,
) -> None:
    """Show runs in a browser: curves, timeline, rollouts, guards, configuration, system. Updates while they run.

    \b
    Examples:
      rill dashboard                    the runs in ./runs
      rill dashboard demo demo-2        two of them
      rill dashboard --host 0.0.0.0     for other machines, with a token in the printed address
    """
    from rill.dashboard.catalog import Catalog
    from rill.dashboard.server import is_loopback, make_app

    folders = [Run.open(run, root=root).path for run in runs or []]
    if not folders and not root.is_dir():
        raise UserError(f"there is no folder {root}: start a run, or say where they are with --root")
    listening = _listen(host, port)
    secret = secrets.token_urlsafe(24) if token or not is_loopback(host) else ""
    catalog = Catalog(folders, root)
    _say_where(host, listening.getsockname()[1], secret, browser)
    with _indexing(folders, root):
        _serve(make_app(catalog, host=host, token=secret), listening)


def _serve(application: object, listening: socket.socket) -> None:
    import uvicorn

    config = uvicorn.Config(application, log_level="warning", access_log=False, lifespan="off")  # type: ignore[arg-type]
    with suppress(
        KeyboardInterrupt
    ):  # uvicorn raises it again once it has closed; it is how a user ends the command
        uvicorn.Server(config).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket: the port itself where one was named, else the first free one."""
    tried = [port] if port else range(DEFAULT_PORT, DEFAULT_PORT + MAX_TRIED_PORTS)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    error: OSError | None = None
    for number in tried:
        try:  # it listens at once: whoever follows the printed address waits, and is not refused
            return socket.create_server((host, number), family=family, backlog=128)
        except OSError as found:
            error = found
    raise UserError(f"cannot listen on {host}:{tried[0]}: {error}: choose another with --port, or --host")


def _say_where(host: str, port: int, secret: str, browser: bool) -> None:
    shown = f"[{host}]" if ":" in host else host
    shown = "localhost" if host in ("127.0.0.1", "0.0.0.0", "::1", "::") else shown
    query = f"/?token={secret}" if secret else "/"
    address = f"http://{shown}:{port}{query}"
    say(f"dashboard      {address}")
    if host in ("0.0.0.0", "::"):
        say(f"from elsewhere http://{socket.gethostname()}:{port}{query}")
    say(f"over ssh       ssh -N -L {port}:localhost:{port} {getpass.getuser()}@{socket.gethostname()}")
    say("Ctrl-C ends it")
    if browser:
        webbrowser.open(address)


@contextmanager
def _indexing(folders: list[Path], root: Path) -> Iterator[None]:
    child = multiprocessing.get_context("spawn").Process(
        target=_index, args=([str(folder) for folder in folders], str(root), os.getpid()), daemon=True
    )
    child.start()
    try:
        yield
    finally:
        child.terminate()
        child.join(timeout=5.0)


def _index(folders: list[str], root: str, parent_pid: int) -> None:
    from rill.dashboard.catalog import find_runs
    from rill.dashboard.indexer import keep_up_to_date

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    os.nice(5)
    keep_up_to_date(lambda: find_runs([Path(folder) for folder in folders], Path(root)), parent_pid)
