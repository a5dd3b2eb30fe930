"""Counters and histograms of the server, with the engine's own figures, in Prometheus' text format."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator

from rill.inference.base import EngineStats
from rill.inference.tally import COUNTS

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


class Histogram:
    def __init__(self, name: str, about: str, bounds: tuple[float, ...]) -> None:
        self.name, self.about, self.bounds = name, about, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self.bounds, value)] += 1
        self._sum += value

    def lines(self) -> Iterator[str]:
        yield f"# HELP {self.name} {self.about}"
        yield f"# TYPE {self.name} histogram"
        total = 0
        for bound, count in zip((*self.bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{self.name}_bucket{{le="{bound}"}} {total}'
        yield f"{self.name}_sum {self._sum:.6f}"
        yield f"{self.name}_count {total}"


class Metrics:
    """Written from the event loop only."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0
        self.num_aborted = 0
        self.latency_s = Histogram("rill_request_seconds", "Time of a generation request.", _SECONDS)
        self.first_token_s = Histogram(
            "rill_first_token_seconds", "Time to a stream's first token.", _SECONDS
        )
        self.completion_tokens = Histogram("rill_completion_tokens", "New tokens of a completion.", _TOKENS)

    def render(self, stats: EngineStats, num_in_flight: int) -> str:
        lines = [
            "# HELP rill_responses_total Answers by route and status.",
            "# TYPE rill_responses_total counter",
        ]
        for (route, status), count in sorted(self.responses.items()):
            lines.append(f'rill_responses_total{{route="{route}",status="{status}"}} {count}')
        for kind, name, about, value in (
            ("counter", "rill_prompt_tokens_total", "Prompt tokens served.", self.num_prompt_tokens),
            ("counter", "rill_generated_tokens_total", "New tokens served.", self.num_completion_tokens),
            ("counter", "rill_aborted_total", "Requests given up or timed out.", self.num_aborted),
            ("gauge", "rill_in_flight", "Generation requests in flight.", num_in_flight),
        ):
            lines += _simple(kind, name, about, value)
        for histogram in (self.latency_s, self.first_token_s, self.completion_tokens):
            lines.extend(histogram.lines())
        lines.extend(_engine_lines(stats))
        return "\n".join(lines) + "\n"


_NOW = ("num_running", "num_waiting", "num_kv_blocks", "num_free_kv_blocks")
"""Of the engine's figures, those that go up and down; the others count."""


def _engine_lines(stats: EngineStats) -> Iterator[str]:
    yield from _simple("gauge", "rill_engine_policy_version", "Of the engine.", stats.version)
    for field in COUNTS:
        kind, ending = ("gauge", "") if field in _NOW else ("counter", "_total")
        name = f"rill_engine_{field.removeprefix('num_')}{ending}"
        yield from _simple(kind, name, "Of the engine.", getattr(stats, field))
    for name, extra in sorted(stats.extra.items()):
        clean = "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
        yield from _simple("gauge", f"rill_engine_extra_{clean}", "Of this kind of engine.", extra)


def _simple(kind: str, name: str, about: str, value: float) -> list[str]:
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}", f"{name} {value}"]
