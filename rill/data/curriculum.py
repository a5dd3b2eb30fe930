"""Which prompts are worth asking next: pools by difficulty, weighted by how well the policy does in them.

The controller calls `learn` as groups finish and `next` as it admits. What it has learnt waits until the next draw and
is then applied in the order of admission, so that at lag 0 draws do not depend on which group finished first.

A group teaches most where about half of its answers are right: its weight is p(1 − p), the variance of a right-or-wrong
reward. Each pool keeps a running success rate p and is drawn in proportion to that, with a floor so that every
pool is asked now and then and its rate stays known. Single prompts that were always right (or never) over
`patience` visits are skipped for a while (online filtering), which spares groups without a gradient.

The order is reproducible: draws depend on the seed and on the outcomes reported so far, and `state()` holds both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from pydantic import Field

from rill.config import Config
from rill.data.base import Dataset, EditableDataset, content_key, place_of
from rill.data.loader import Loader, LoaderConfig
from rill.errors import CheckpointError
from rill.types import Prompt

PRIOR = 0.5
"""Success rate that a pool starts from."""


class CurriculumConfig(Config):
    pools: int = Field(default=8, ge=1)
    """Difficulty pools of equal size. Fewer are made where prompts have fewer different difficulties."""
    floor: float = Field(default=0.05, ge=0.0, le=1.0)
    """Share of the draws that goes to all pools alike. 1: no curriculum."""
    memory: float = Field(default=0.98, gt=0.0, lt=1.0)
    """How much of a pool's success rate is kept at each report."""
    patience: int = Field(default=2, ge=0)
    """A prompt all right (or all wrong) so many times in a row is set aside. 0: never."""
    rest: int = Field(default=2_000, ge=1)
    """For how many draws a prompt is set aside."""
    index_limit: int = Field(default=50_000, ge=1)
    """Prompts that are looked at to make the pools."""
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class _Pool:
    easiest: float
    hardest: float
    success: float
    num_reports: int = 0


@dataclass(slots=True, kw_only=True)
class _Record:
    """What is known of one prompt."""

    streak: int = 0
    """Visits in a row that were all right (positive) or all wrong (negative)."""
    until: int = 0
    """Set aside until so many draws have been made."""


class Curriculum:
    """Draws prompts from pools of an indexable dataset.

    >>> curriculum = Curriculum(dataset, CurriculumConfig(pools=4))
    >>> prompts = curriculum.next(32)
    >>> curriculum.learn(0, prompts[0], reward=0.75)      # for every finished group
    """

    def __init__(self, dataset: Dataset, config: CurriculumConfig | None = None) -> None:
        self.config = config or CurriculumConfig()
        self.dataset = dataset
        self._pools, members = _make_pools(dataset, self.config)
        self._loaders = [
            Loader(_Subset(dataset, indices), LoaderConfig(seed=self.config.seed + k))
            for k, indices in enumerate(members)
        ]
        self._num_draws = 0
        self._num_set_aside = 0
        self._records: dict[str, _Record] = {}
        self._waiting: list[tuple[int, Prompt, float]] = []

    def next(self, count: int) -> list[Prompt]:
        self._apply()
        return [self._draw() for _ in range(count)]

    def learn(self, index: int, prompt: Prompt, reward: float) -> None:
        """A group counts as right by its mean reward, cut to 0…1; groups that a filter dropped count too. `index`: its
        place in the order of admission."""
        self._waiting.append((index, prompt, min(1.0, max(0.0, reward))))

    def _apply(self) -> None:
        waiting, self._waiting = sorted(self._waiting, key=lambda learnt: learnt[0]), []
        for _, prompt, success in waiting:
            self._report(prompt, success)

    def _report(self, prompt: Prompt, success: float) -> None:
        """`success` is the share of a group's answers that were right, from 0 to 1."""
        pool = self._pools[self.pool_of(prompt)]
        # A plain mean at first (the prior counts as one report), a fading one once there are many.
        keep = min(self.config.memory, (pool.num_reports + 1.0) / (pool.num_reports + 2.0))
        pool.success = keep * pool.success + (1.0 - keep) * success
        pool.num_reports += 1
        if not self.config.patience:
            return
        record = self._records.setdefault(_key(prompt), _Record())
        if 0.0 < success < 1.0:
            record.streak = 0
        else:
            sign = 1 if success == 1.0 else -1
            record.streak = record.streak + sign if record.streak * sign >= 0 else sign
        if abs(record.streak) >= self.config.patience:
            record.until = self._num_draws + self.config.rest
            record.streak -= 1 if record.streak > 0 else -1  # one more bad visit sets it aside again
        if record == _Record():
            del self._records[_key(prompt)]  # nothing to remember: checkpoints hold all of them

    def pool_of(self, prompt: Prompt) -> int:
        """By difficulty; a prompt without one is in the first pool."""
        difficulty = prompt.difficulty or 0.0
        return next(
            (k for k, pool in enumerate(self._pools) if difficulty <= pool.hardest), len(self._pools) - 1
        )

    def chances(self) -> list[float]:
        """The probability of each pool, from the easiest to the hardest."""
        weights = np.array([pool.success * (1.0 - pool.success) for pool in self._pools])
        total = weights.sum()
        even = np.full(len(weights), 1.0 / len(weights))
        learned = weights / total if total > 0 else even
        mixed: list[float] = (self.config.floor * even + (1.0 - self.config.floor) * learned).tolist()
        return mixed

    def metrics(self) -> dict[str, float]:
        chances = self.chances()
        figures = {"curriculum/set_aside": float(self._num_set_aside)}
        for k, pool in enumerate(self._pools):
            figures[f"curriculum/success_{k}"] = pool.success
            figures[f"curriculum/chance_{k}"] = chances[k]
        return figures

    def state(self) -> dict[str, Any]:
        self._apply()
        return {
            "num_draws": self._num_draws,
            "num_set_aside": self._num_set_aside,
            "pools": [asdict(pool) for pool in self._pools],
            "loaders": [loader.state() for loader in self._loaders],
            "records": {key: asdict(record) for key, record in self._records.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        edges = [(pool["easiest"], pool["hardest"]) for pool in state["pools"]]
        if edges != [(pool.easiest, pool.hardest) for pool in self._pools]:
            raise CheckpointError(
                "the curriculum was saved with other pools: keep the dataset and `pools` to resume"
            )
        self._num_draws = int(state["num_draws"])
        self._num_set_aside = int(state["num_set_aside"])
        self._pools = [_Pool(**pool) for pool in state["pools"]]
        self._records = {key: _Record(**record) for key, record in state["records"].items()}
        for loader, saved in zip(self._loaders, state["loaders"], strict=True):
            loader.load_state(saved)

    def _draw(self) -> Prompt:
        rng = np.random.default_rng([self.config.seed, 0, self._num_draws])
        self._num_draws += 1
        pool = int(rng.choice(len(self._pools), p=self.chances()))
        loader = self._loaders[pool]
        # Looks at each prompt of the pool once at most: if all rest, the pool is asked all the same.
        for _ in range(min(len(loader.dataset), 64)):
            prompt = loader.next(1)[0]
            record = self._records.get(_key(prompt))
            if record is None or record.until <= self._num_draws:
                return prompt
            self._num_set_aside += 1
        return prompt


def _key(prompt: Prompt) -> str:
    """Short, whatever the prompt's length."""
    return f"{place_of(content_key(prompt)):016x}"


class _Subset:
    def __init__(self, dataset: Dataset, indices: list[int]) -> None:
        self._dataset = dataset
        self._indices = indices
        self.digests = dataset.digests if isinstance(dataset, EditableDataset) else {}

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Prompt:
        return self._dataset[self._indices[index]]


def _make_pools(dataset: Dataset, config: CurriculumConfig) -> tuple[list[_Pool], list[list[int]]]:
    """Pools of about equal size; prompts of one difficulty are never in two pools."""
    count = min(len(dataset), config.index_limit)
    difficulties = [dataset[index].difficulty or 0.0 for index in range(count)]
    order = sorted(range(count), key=lambda index: (difficulties[index], index))
    pools: list[_Pool] = []
    members: list[list[int]] = []
    for position, index in enumerate(order):
        difficulty = difficulties[index]
        is_due = not pools or position >= len(pools) * count / config.pools
        if is_due and (not pools or difficulty > pools[-1].hardest):
            pools.append(_Pool(easiest=difficulty, hardest=difficulty, success=PRIOR))
            members.append([])
        pools[-1].hardest = difficulty
        members[-1].append(index)
    return pools, members
