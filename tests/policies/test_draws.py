"""Random numbers by row."""

import numpy as np
import torch

from rill.policies.draws import Draws


def test_a_row_is_given_the_same_whoever_is_beside_it() -> None:
    alone = Draws([7])
    first, second, third = alone.normal(2, 3), alone.uniform(4), alone.integer(5)
    among = Draws([3, 2**64 - 1, 7])
    assert torch.equal(among.normal(2, 3)[2:], first)
    assert torch.equal(among.uniform(4)[2:], second)
    assert torch.equal(among.integer(5)[2:], third)


def test_they_are_spread_as_they_should_be_and_neighbouring_seeds_share_nothing() -> None:
    draws = Draws(range(20_000))
    normal, uniform = draws.normal(8).double(), draws.uniform(8).double()
    assert abs(normal.mean()) < 0.01 and abs(normal.std() - 1.0) < 0.01
    assert abs((normal**4).mean() - 3.0) < 0.1
    assert uniform.min() >= 0.0 and uniform.max() < 1.0 and abs(uniform.var() - 1 / 12) < 1e-3
    both = torch.cat([normal, uniform], 1).numpy()
    between_columns = np.corrcoef(both.T) - np.eye(16)
    assert np.abs(between_columns).max() < 0.03
    centred = both - both.mean(0)
    between_rows = [float((centred[:-lag] * centred[lag:]).mean()) for lag in (1, 2, 64)]
    assert np.abs(between_rows).max() < 0.01
    counts = torch.bincount(draws.integer(4), minlength=4)
    assert counts.min() > 4_800
