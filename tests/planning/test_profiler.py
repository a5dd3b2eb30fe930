"""What a recipe is measured with."""

from __future__ import annotations

import pytest

from rill.config import load_recipe, resolve
from rill.planning.elastic import ElasticConfig
from rill.planning.profiler import _short
from rill.workflows.grpo import GRPO


@pytest.mark.parametrize("rule", ["elastic.prompts_per_engine=4", "elastic.schedule={ 0 = 1 }"])
def test_no_engine_joins_or_leaves_while_a_recipe_is_measured(rule: str) -> None:
    values = load_recipe("demo", [rule])
    config = resolve(GRPO.Config, values.values, values.provenance)
    assert config.elastic != ElasticConfig()
    assert _short(config, {"rollout": "0-1"}, 3).elastic == ElasticConfig()
