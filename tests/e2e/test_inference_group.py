"""Log π_old from a group of its own: the same training, on other devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rill.errors import ConfigError
from rill.telemetry.run import Run
from tests.e2e.tiny import EXACT, RECIPE, resolved, start


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param(("cluster.devices=1", "placement.inference=0"), marks=pytest.mark.slow),
        ("cluster.devices=4", "placement.rollout=0", "placement.inference=1-2", "placement.actor=3"),
    ],
    ids=["shared", "split"],
)
def test_an_inference_group_trains_the_policy_that_the_actor_alone_trains(
    whole: Run, tmp_path: Path, placement: tuple[str, ...]
) -> None:
    helped = start(tmp_path, "helped", *EXACT, *placement)
    for name, weight in weights_of(helped).items():
        torch.testing.assert_close(weight, weights_of(whole)[name], atol=1e-5, rtol=1e-4)


def test_an_inference_group_without_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to do"):
        resolved(RECIPE, ["placement.inference=0"])


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.path / "model" / "model.safetensors")
