from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from rill.dashboard.curves import MAX_POINTS, curves_of, draw, write_curves
from rill.errors import UserError
from rill.telemetry.metrics import MetricLog, read_metrics
from rill.telemetry.run import Run


def run_with(folder: Path, rows: list[dict[str, float]]) -> Run:
    run = Run.create("r", root=folder)
    log = MetricLog(run.path)
    for step, values in enumerate(rows):
        log.write(step, values)
    log.close()
    run.close()
    return run


def test_the_picture_is_small_well_formed_and_tells_first_and_last_value(tmp_path: Path) -> None:
    rows = [{"reward/mean": step / 1000, "eval/accuracy": 0.25 + step / 2000} for step in range(1000)]
    target = write_curves(run_with(tmp_path, rows), tmp_path / "curves.svg")
    root = ElementTree.fromstring(target.read_text(encoding="utf-8"))
    titles = [e.text for e in root.iter() if e.get("class") == "t"]
    assert titles == ["held-out accuracy: 0.25 → 0.75", "reward: 0 → 0.999"]
    assert target.stat().st_size < 8_000


def test_a_figure_with_fewer_than_two_values_is_not_drawn(tmp_path: Path) -> None:
    run = run_with(tmp_path, [{"reward/mean": 0.5, "eval/accuracy": 0.5}, {"reward/mean": 0.6}])
    assert [title for title, _ in curves_of(read_metrics(run.path))] == ["reward"]


def test_a_run_without_figures_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no figures to draw yet"):
        write_curves(run_with(tmp_path, []), tmp_path / "curves.svg")


def test_a_long_curve_is_averaged_and_keeps_both_ends(tmp_path: Path) -> None:
    [(_, thin)] = curves_of(
        read_metrics(run_with(tmp_path, [{"reward/mean": float(i)} for i in range(1000)]).path)
    )
    assert len(thin) == MAX_POINTS
    assert (thin[0], thin[-1]) == ((0, 0.0), (999, 999.0))
    assert sum(y for _, y in thin[1:-1]) / (MAX_POINTS - 2) == pytest.approx(499.5, rel=0.01)


def test_a_curve_that_does_not_move_is_drawn_in_the_middle() -> None:
    picture = draw([("loss", [(0, 3.0), (1, 3.0)])])
    assert 'class="c" d="M38.0 78.0L242.0 78.0"' in picture
