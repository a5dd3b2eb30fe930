"""The pages in a real browser, over a real server. A test starts what it needs; without a browser it is skipped."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rill.dashboard
from rill.dashboard.report import write_report
from rill.telemetry.metrics import MetricLog
from rill.telemetry.run import Run, RunStatus
from tests.dashboard.folders import append, group, sample, small_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
AXE = Path(rill.dashboard.__file__).parent / "web" / "node_modules" / "axe-core" / "axe.min.js"
PAGES = ("overview", "timeline", "flow", "rollouts", "guards", "config", "system")
WAIT_MS = 60_000
COMMAND = [sys.executable, "-c", "from rill.cli.main import main; main()"]

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None,
        reason="playwright is not installed: pip install playwright",
    ),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt install chromium)"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """A page whose errors fail the test when it ends."""
    contexts: list[Any] = []
    errors: list[str] = []

    def open_page(address: str, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
        contexts.append(context)
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """`rill dashboard` as a user starts it; gives its address."""
    started: list[subprocess.Popen[str]] = []

    def serve(*arguments: str) -> str:
        process = subprocess.Popen(
            [*COMMAND, "dashboard", *arguments], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
        )
        started.append(process)
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        return found[0]

    yield serve
    for process in started:
        process.terminate()
        process.wait(timeout=60)


def goto(page: Any, name: str) -> None:
    page.evaluate(f"location.hash = '#/{name}'")


def point_at(page: Any, selector: str) -> None:
    box = page.locator(selector).bounding_box()
    page.mouse.move(box["x"] + box["width"] - 200, box["y"] + 20)


def text_of(page: Any) -> str:
    return str(page.locator("main").inner_text())


def serious_findings(page: Any) -> list[tuple[str, str, str]]:
    """Of axe, where it is installed."""
    if not AXE.exists():
        return []
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [
        (one["id"], one["nodes"][0]["html"][:200], one["nodes"][0].get("failureSummary", "")[:300])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


def test_a_run_is_seen_and_followed_while_it_goes_on(
    tmp_path: Path, serve: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    run = small_run(tmp_path, is_running=True)
    page = open_page(serve("--root", str(tmp_path)))
    page.wait_for_selector(".plot canvas")
    assert "step 3" in page.locator(".head").inner_text()
    with MetricLog(run.path) as log:
        log.write(4, {"reward/mean": 0.987})
    page.wait_for_selector("text=0.987")
    goto(page, "rollouts")
    page.wait_for_selector("text=2 of 2 groups")
    append(run.path / "rollouts" / "rollout-0.jsonl", group(4, "g9", sample("newest words", 1.0)))
    page.wait_for_selector("text=3 of 3 groups")
    run.set_status(RunStatus.FINISHED)
    run.close()
    page.wait_for_selector(".status.finished")
    assert page.title() == "small: rill", "the script in a rollout did nothing"


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 360])
def test_every_page_is_readable_at_both_widths_and_keeps_its_address(
    tmp_path: Path, serve: Callable[..., str], open_page: Callable[..., Any], width: int
) -> None:
    small_run(tmp_path)
    address = serve("--root", str(tmp_path))
    words = {
        "overview": "Run card", "timeline": "spans", "flow": "No plan is recorded", "rollouts": "2 of 2 groups",
        "guards": "Lower max_lag.", "config": "recipes/x.toml:4", "system": "Processor cores",
    }  # fmt: skip
    for name in PAGES:
        page = open_page(f"{address}#/{name}?run=small", viewport={"width": width, "height": 900})
        page.wait_for_selector(f"main >> text={words[name]}")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
            f"{name} is wider than the window"
        )
        tabs = page.locator("nav a").evaluate_all(
            "tabs => tabs.map(tab => tab.getBoundingClientRect()).map(box => [box.left, box.right, box.bottom])"
        )
        theme = page.locator(".theme").bounding_box()
        header = page.locator("body > #app > header").bounding_box()
        assert all(left >= 0 and right <= theme["x"] for left, right, _ in tabs), (
            "every page has its tab in sight"
        )
        assert max(bottom for _, _, bottom in tabs) <= header["y"] + header["height"] + 1


@pytest.mark.slow
def test_a_link_reopens_the_same_view(
    tmp_path: Path, serve: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    small_run(tmp_path)
    page = open_page(serve("--root", str(tmp_path)) + "#/rollouts")
    page.wait_for_selector("text=2 of 2 groups")
    page.fill("[aria-label='its id']", "q")
    page.press("[aria-label='its id']", "Enter")
    page.wait_for_selector("text=1 of 2 groups")
    page.click("text=reset")
    page.wait_for_selector("text=2 of 2 groups")
    page.fill("#search", "document.title")
    page.wait_for_selector("text=1 of 2 groups")
    page.click(".groups button")
    page.select_option("label:has-text('show') >> select", "diff")
    page.wait_for_selector("ins")
    again = open_page(page.url)
    again.wait_for_selector("ins")
    assert again.input_value("#search") == "document.title"
    assert again.locator(".group h2").inner_text() == "Group g1"


@pytest.mark.slow
def test_what_a_model_says_is_never_markup(
    tmp_path: Path, serve: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    run = small_run(tmp_path)
    bad = "<img src=x onerror=\"document.title='owned'\"><svg onload=\"document.title='owned'\">"
    everywhere = group(
        5, bad, sample(bad, 0.0, error=bad, stop=bad, tags=[bad]), task=bad, prompt_id=bad, answer=bad
    )
    append(run.path / "rollouts" / "rollout-0.jsonl", everywhere)
    append(run.path / "guards.jsonl", {"guard": bad, "step": 1, "action": bad, "seen": bad, "meaning": bad})
    (run.path / "flow.json").write_text('{"nodes": [{"id": "<img src=x onerror=alert(1)>"}]}')
    for address in (serve("--root", str(tmp_path)), write_report(run).as_uri()):
        page = open_page(address)
        for name in PAGES:
            goto(page, name)
            page.wait_for_timeout(500)
            assert page.title() == "small: rill"
            assert page.locator("main img").count() == 0
        goto(page, "rollouts?order=newest")
        page.wait_for_selector(".group >> text=onerror >> nth=0")


@pytest.mark.slow
def test_a_report_opens_from_disk_with_the_network_off(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    report = write_report(small_run(tmp_path))
    page = open_page(report.as_uri(), offline=True)
    page.wait_for_selector(".plot canvas")
    for name, words in (("timeline", "spans"), ("rollouts", "2 of 2 groups"), ("config", "loop.steps")):
        goto(page, name)
        page.wait_for_selector(f"main >> text={words}")
    goto(page, "rollouts?only=failed")
    page.wait_for_selector("text=1 of 2 groups")


@pytest.mark.slow
def test_cut_and_corrupted_logs_show_what_is_there(
    tmp_path: Path, serve: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    run = small_run(tmp_path)
    for log in [run.metrics_path, *run.path.glob("trace/*.jsonl"), *run.path.glob("rollouts/*.jsonl")]:
        log.write_bytes(log.read_bytes()[:-20] + b"\n\x00\xff\xfe garbage\n" + b"x" * 100_000)
    (run.path / "status.json").write_text("{")
    page = open_page(serve("--root", str(tmp_path)))
    page.wait_for_selector(".status.unknown")
    for name in PAGES:
        goto(page, name)
        page.wait_for_timeout(400)
        assert text_of(page).strip()
    goto(page, "rollouts")
    page.wait_for_selector("text=1 of 1 groups")


@pytest.mark.slow
def test_the_wheel_scrolls_the_page_and_with_control_zooms(
    tmp_path: Path, serve: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    small_run(tmp_path)
    page = open_page(serve("--root", str(tmp_path)) + "#/timeline", viewport={"width": 900, "height": 320})
    page.wait_for_selector("text=of 3.0 s")
    point_at(page, "canvas")
    page.mouse.wheel(0, 120)
    _wait_for(lambda: page.evaluate("scrollY") > 0, 60)
    assert "t=" not in page.url
    page.evaluate("scrollTo(0, 0)")
    point_at(page, "canvas")
    page.keyboard.down("Control")
    page.mouse.wheel(0, -120)
    page.keyboard.up("Control")
    _wait_for(lambda: "t=" in page.url, 60)
    page.locator("canvas").focus()
    page.keyboard.press("0")
    _wait_for(lambda: "t=" not in page.url, 60)


@pytest.mark.slow
def test_runs_are_laid_over_one_another_and_their_configurations_compared(
    tmp_path: Path, serve: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    small_run(tmp_path)
    other = small_run(tmp_path, "other")
    other.config_path.write_text(other.config_path.read_text().replace("steps = 3", "steps = 9"))
    page = open_page(serve("--root", str(tmp_path)) + "#/overview?run=small")
    page.check("[aria-label='lay other over']")
    page.wait_for_selector(".bar .chip:has-text('other')")
    page.wait_for_selector(".plot .value:has-text('other')")
    goto(page, "config?run=small&diff=other")
    page.wait_for_selector("main >> text=loop.steps")
    assert page.locator("tbody tr").count() == 1, "only what differs"


@pytest.mark.slow
@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: `make web` brings it")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_page_has_a_serious_accessibility_finding(
    tmp_path: Path, serve: Callable[..., str], open_page: Callable[..., Any], theme: str
) -> None:
    run = small_run(tmp_path)
    append(
        run.path / "rollouts" / "rollout-1.jsonl", *(group(v, f"x{v}", sample("4", 1.0)) for v in range(1, 9))
    )
    page = open_page(serve("--root", str(tmp_path)), color_scheme=theme)
    for name in PAGES:
        goto(page, name)
        page.wait_for_timeout(800)
        assert serious_findings(page) == [], name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_run_is_followed_from_its_start_to_its_report(
    tmp_path: Path, serve: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    changes = ["sft.steps=30", "loop.steps=3", "loop.prompts_per_step=4", "eval.num_prompts=16"]
    training = subprocess.Popen(
        [*COMMAND, "train", "demo", "--root", str(tmp_path), *changes],
        stdout=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        _wait_for(lambda: (tmp_path / "demo" / "status.json").exists(), 120)
        page = open_page(serve("--root", str(tmp_path)))
        page.wait_for_selector(".status.running")
        page.wait_for_selector(".plot:has-text('Reward') canvas", timeout=300_000)
        page.wait_for_selector(".status.finished", timeout=300_000)
        assert training.wait(timeout=120) == 0
        words = {
            "overview": "Run card", "timeline": "device 0", "flow": "bottleneck", "rollouts": "groups",
            "guards": "The end of the log", "config": "recipes/demo.toml", "system": "Processor cores",
        }  # fmt: skip
        for name in PAGES:
            goto(page, name)
            page.wait_for_selector(f"main >> text={words[name]} >> nth=0", state="attached")
            assert serious_findings(page) == [], name
        goto(page, "rollouts?from=0&to=0&task=arithmetic")
        page.wait_for_selector(".sample")
        assert page.locator("option:has-text('not recorded')").count() == 0, "the trainer's figures are there"
        assert "evaluation: held_out" in page.locator("label:has-text('data') >> select").inner_text()
        report = open_page(Run(tmp_path / "demo").path.joinpath("report.html").as_uri(), offline=True)
        report.wait_for_selector(".plot:has-text('Reward') canvas")
    finally:
        if training.poll() is None:
            training.terminate()
            training.wait(timeout=60)


def _wait_for(is_done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.2)
