"""How a benchmark tells a result: one JSON object a line, numbers to five digits."""

from __future__ import annotations

import json
from typing import Any


def report(**figures: Any) -> None:
    told = {
        name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in figures.items()
    }
    print(json.dumps(told), flush=True)
