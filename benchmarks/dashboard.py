"""How fast the dashboard is on a large run: indexing, first paint, interaction, memory of the server.

    python benchmarks/dashboard.py [--steps 1000] [--rollouts 1000000] [--spans 10000000] [--folder KEPT]

JSON lines. The targets of the design: first paint 1 s, an interaction 100 ms, the server 300 MB. The rival in the same
run is reading the same logs whole, as a page without an index has to before it can show anything. With a Chromium and
Playwright the page itself is timed; else the requests that it makes. `--folder` keeps the folder, or uses one again.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
from report import report
from run_folder import make_run_folder

from rill.dashboard import indexer

REPEATS = 10
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VIEWS = {
    "timeline, whole run": "/timeline?columns=1000",
    "timeline, a tenth": "/timeline?columns=1000&from={0.4}&to={0.5}",
    "timeline, a hundredth": "/timeline?columns=1000&from={0.4}&to={0.41}",
    "timeline, one step": "/timeline?columns=1000&from={0.4}&to={0.401}",
    "rollouts, newest": "/rollouts?count=40",
    "rollouts, filtered and ordered": "/rollouts?count=40&min=0.5&stop=length&order=worst",
    "rollouts, a common word": "/rollouts?count=500&text=carry",
    "rollouts, an absent word": "/rollouts?count=500&text=zzzz",
    "one group": "/group?log=1&place=100",
    "one prompt over training": "/prompt?id=sum/77",
    "metrics": "/metrics",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--spans", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch) / "big"
        if not folder.exists():
            sizes = {"steps": given.steps, "rollouts": given.rollouts, "spans": given.spans}
            timed("make the folder", lambda: make_run_folder(folder, **sizes), **sizes)
        logs = [*indexer.logs_of(folder, "trace"), *indexer.logs_of(folder, "rollouts")]
        size = sum(log.stat().st_size for log in logs)
        timed("read the logs whole", lambda: read_whole(logs), log_bytes=size)
        if indexer.progress(folder) < 1.0:
            timed("index them, once", lambda: indexer.bring_up_to_date(folder), log_bytes=size)
        with dashboard(folder) as (address, server):
            time_requests(f"{address}api/run/{folder.name}")
            if CHROMIUM is not None:
                time_page(address, folder.name)
            report(what="memory of the server", rss_mb=round(server.memory_info().rss / 1e6, 1))


def read_whole(logs: list[Path]) -> None:
    for log in logs:
        with log.open("rb") as file:
            for line in file:
                msgspec.json.decode(line)


@contextmanager
def dashboard(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    command = [sys.executable, "-c", "from rill.cli.main import main; main()", "dashboard", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        yield found[0], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(timeout=60)


def time_requests(base: str) -> None:
    with httpx.Client(timeout=60) as client:
        seconds = client.get(f"{base}/timeline?columns=10").json()["seconds"]
        for name, path in VIEWS.items():
            asked = re.sub(r"\{([\d.]+)\}", lambda share: str(float(share[1]) * seconds), path)
            took = [_took_ms(lambda: client.get(base + asked).raise_for_status()) for _ in range(REPEATS)]  # noqa: B023
            report(what=f"request: {name}", median_ms=_median(took), worst_ms=round(max(took), 1))


def time_page(address: str, run: str) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name, ready in (
            ("overview", ".plot canvas"),
            ("timeline", ".legend .chip"),
            ("rollouts", ".sample"),
        ):
            took = [_paint_ms(browser, f"{address}#/{name}?run={run}", ready) for _ in range(3)]
            report(what=f"first paint: {name}", median_ms=_median(took), worst_ms=round(max(took), 1))
        page = browser.new_page()
        page.goto(f"{address}#/timeline?run={run}")
        page.wait_for_selector(".legend .chip")
        took = [_zoom_ms(page) for _ in range(REPEATS)]
        report(
            what="interaction: zoom until the new view is drawn",
            median_ms=_median(took),
            worst_ms=round(max(took), 1),
        )
        browser.close()


def _paint_ms(browser: Any, address: str, ready: str) -> float:
    page = browser.new_page()
    try:
        return _took_ms(lambda: (page.goto(address), page.wait_for_selector(ready)))
    finally:
        page.close()


def _zoom_ms(page: Any) -> float:
    """From the click's event until the frame that shows the new view, by the page's own clock: the robot's hand, which
    looks for the button, waits until it stands still and moves the mouse there, is not counted."""
    took: float = page.evaluate(
        """() => new Promise((done, fail) => {
            setTimeout(() => fail(new Error("no new view within 30 s")), 30000);
            const began = performance.now();
            const shown = new MutationObserver(() => {
                shown.disconnect();
                requestAnimationFrame(() => setTimeout(() => done(performance.now() - began)));
            });
            shown.observe(document.querySelector(".bar > .soft"), { childList: true });
            document.querySelector("[aria-label='zoom in']").click();
        })"""
    )
    return took


def timed(what: str, act: Callable[[], Any], **facts: Any) -> None:
    report(what=what, seconds=round(_took_ms(act) / 1000, 2), **facts)


def _took_ms(act: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    act()
    return (time.perf_counter() - began_s) * 1000


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 1)


if __name__ == "__main__":
    main()
