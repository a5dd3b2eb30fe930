"""The loader: one global order, disjoint ranks, exact resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rill.data.curriculum import Curriculum
from rill.data.jsonl import JsonlDataset
from rill.data.loader import Loader, LoaderConfig, PromptSource, StreamLoader, open_loader
from rill.data.mixture import MixtureDataset
from rill.errors import CheckpointError, DataError
from rill.types import Prompt


class Numbers:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(id=str(index), text=f"{index}=")


class NumberStream:
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Prompt]:
        return (Prompt(id=str(i), text=f"{i}=") for i in range(self.size))


def ids(prompts: list[Prompt]) -> list[str]:
    return [p.id for p in prompts]


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 50), world=st.integers(1, 7), seed=st.integers(0, 5))
def test_the_ranks_of_an_epoch_read_every_row_once(size: int, world: int, seed: int) -> None:
    loaders = [Loader(Numbers(size), LoaderConfig(seed=seed), rank=r, world=world) for r in range(world)]
    epochs = world  # after world epochs every rank has read exactly `size` rows
    read = [i for loader in loaders for i in ids(loader.next(size * epochs // world))]
    assert sorted(read) == sorted([str(i) for i in range(size)] * epochs)


def test_the_global_order_is_the_same_for_every_world_size() -> None:
    alone = ids(Loader(Numbers(24), LoaderConfig(seed=1)).next(24))
    parts = [ids(Loader(Numbers(24), LoaderConfig(seed=1), rank=r, world=3).next(8)) for r in range(3)]
    assert [parts[p % 3][p // 3] for p in range(24)] == alone
    assert alone != [str(i) for i in range(24)]


def test_epochs_have_different_orders_and_seeds_too() -> None:
    loader = Loader(Numbers(30), LoaderConfig(seed=1))
    first, second = ids(loader.next(30)), ids(loader.next(30))
    assert first != second and sorted(first) == sorted(second)
    assert ids(Loader(Numbers(30), LoaderConfig(seed=2)).next(30)) != first


@settings(max_examples=30, deadline=None)
@given(before=st.integers(0, 70), after=st.integers(1, 70))
def test_resume_continues_with_the_very_next_prompt(before: int, after: int) -> None:
    straight = Loader(Numbers(23), LoaderConfig(seed=5), rank=1, world=2)
    straight.next(before)
    resumed = Loader(Numbers(23), LoaderConfig(seed=5), rank=1, world=2)
    resumed.load_state(straight.state())
    assert ids(resumed.next(after)) == ids(straight.next(after))


def test_a_resume_with_another_world_size_goes_on_at_the_same_place() -> None:
    two = [Loader(Numbers(40), LoaderConfig(seed=5), rank=r, world=2) for r in range(2)]
    read = {i for loader in two for i in ids(loader.next(6))}
    four = [Loader(Numbers(40), LoaderConfig(seed=5), rank=r, world=4) for r in range(4)]
    for loader in four:
        loader.load_state(two[0].state())
    rest = [i for loader in four for i in ids(loader.next(7))]
    assert sorted([*read, *rest]) == sorted(str(i) for i in range(40))


def test_a_state_of_another_order_is_refused() -> None:
    loader = Loader(Numbers(10), LoaderConfig(seed=1))
    with pytest.raises(CheckpointError, match="seed"):
        loader.load_state(Loader(Numbers(10), LoaderConfig(seed=2)).state())
    with pytest.raises(CheckpointError, match="size"):
        loader.load_state(Loader(Numbers(11), LoaderConfig(seed=1)).state())


def test_rows_that_were_edited_since_are_refused_though_they_are_as_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RILL_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "rows.jsonl"

    def write(to: Path, last_answer: int) -> None:
        rows = [{"question": f"{n}+1?", "answer": n + 1} for n in range(9)] + [
            {"question": "9+1?", "answer": last_answer}
        ]
        to.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def plain(at: Path = path) -> Loader:
        return Loader(JsonlDataset(JsonlDataset.Config(path=str(at))))

    def mixed() -> Loader:
        source = {"dataset": {"type": "jsonl", "path": str(path)}}
        return Loader(MixtureDataset(MixtureDataset.Config.model_validate({"sources": [source]})))

    def drawn() -> Curriculum:
        return Curriculum(JsonlDataset(JsonlDataset.Config(path=str(path))))

    sources: tuple[Callable[[], PromptSource], ...] = (plain, mixed, drawn)
    write(path, last_answer=10)
    states = [json.loads(json.dumps(source().state())) for source in sources]
    write(path, last_answer=99)
    for source, state in zip(sources, states, strict=True):
        with pytest.raises(CheckpointError, match=r"rows.jsonl has other rows .* another name"):
            source().load_state(state)
    path.rename(tmp_path / "edited.jsonl")
    plain(tmp_path / "edited.jsonl").load_state(states[0])
    write(path, last_answer=10)  # the same, written later
    for source, state in zip(sources, states, strict=True):
        source().load_state(state)


def test_an_empty_dataset_and_a_rank_outside_the_world_are_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        Loader(Numbers(0))
    with pytest.raises(DataError, match="rank 2"):
        Loader(Numbers(3), rank=2, world=2)


def test_stream_ranks_read_disjoint_parts_and_resume_exactly() -> None:
    config = LoaderConfig(seed=3, shuffle_buffer=5)
    loaders = [open_loader(NumberStream(21), config, rank=r, world=2) for r in range(2)]
    assert all(isinstance(loader, StreamLoader) for loader in loaders)
    first, second = ids(loaders[0].next(11)), ids(loaders[1].next(10))
    assert sorted(first + second) == sorted(str(i) for i in range(21))
    assert first != sorted(first, key=int)
    resumed = open_loader(NumberStream(21), config, rank=0, world=2)
    resumed.load_state(loaders[0].state())
    assert ids(resumed.next(30)) == ids(loaders[0].next(30))
