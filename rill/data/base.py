"""What a dataset is: an indexable or streamable source of Prompts with two sides that never overlap.

Callers: the loader (and through it rollout and SFT workers) and evaluation.

A problem lies on the held-out side when the hash of its *content* falls under the configured share, so the same
problem can never be on both sides, whatever its row number, file order or generator seed. Both sides come
from one configuration; which one is wanted is said when it is opened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any, Protocol, runtime_checkable

from pydantic import Field

from rill.config import PartConfig
from rill.errors import DataError
from rill.registry import Registry
from rill.types import Prompt

DATASETS = Registry(
    "dataset",
    {
        "arithmetic": "rill.data.tasks.arithmetic:ArithmeticDataset",
        "vault": "rill.data.tasks.vault:VaultDataset",
        "programs": "rill.data.tasks.programs:ProgramsDataset",
        "shapes": "rill.data.tasks.shapes:ShapesDataset",
        "reasoning_gym": "rill.data.tasks.gym:ReasoningGymDataset",
        "jsonl": "rill.data.jsonl:JsonlDataset",
        "parquet": "rill.data.parquet:ParquetDataset",
        "hub": "rill.data.hub:HubDataset",
        "folder": "rill.data.folder:FolderDataset",
        "generated": "rill.data.generated:GeneratedDataset",
        "stream": "rill.data.generated:GeneratedStream",
        "mixture": "rill.data.mixture:MixtureDataset",
        "initial_states": "rill.data.initial_states:InitialStates",
        "gymnasium": "rill.envs.gymnasium:GymnasiumTasks",
        "verifiers": "rill.envs.verifiers.tasks:VerifiersTasks",
    },
)

Share = Annotated[float, Field(ge=0.0, lt=1.0)]


class Split(StrEnum):
    TRAIN = "train"
    HELD_OUT = "held_out"
    ALL = "all"  # both sides; for files that are wholly one side already


class DatasetConfig(PartConfig):
    """What every dataset has."""

    held_out: Share = 0.0
    """Share of the problems kept away from training, chosen by a hash of their content. 0: none."""


@runtime_checkable
class Dataset(Protocol):
    """An indexable source. `dataset[i]` is the same Prompt every time, in every process."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt: ...


@runtime_checkable
class StreamDataset(Protocol):
    """A source that can only be read forwards. Every iteration starts again with the same Prompts."""

    def __iter__(self) -> Iterator[Prompt]: ...


@runtime_checkable
class PartedStream(Protocol):
    """A stream that knows how to leave out what is not a rank's own."""

    def part(self, rank: int, world: int) -> Iterator[Prompt]:
        """The prompts at positions rank, rank + world, …: what islice(stream, rank, None, world) would give."""


@runtime_checkable
class EditableDataset(Protocol):
    """One whose rows somebody may edit between two openings."""

    @property
    def digests(self) -> Mapping[str, str]:
        """Of what the rows are read from, by its name."""


@runtime_checkable
class CheckedDataset(Protocol):
    """One whose rows can be found fault with by their place in a file."""

    def check_every(self, check: Callable[[Prompt], object]) -> None: ...


def open_dataset(
    config: PartConfig, split: Split = Split.TRAIN, *, check: Callable[[Prompt], object] | None = None
) -> Dataset | StreamDataset:
    """Build the dataset that the configuration names. `check`: a function that raises DataError for a prompt of no use;
    where the prompts are rows of files, none is left for later.

    >>> train = open_dataset(config, Split.TRAIN)
    >>> held_out = open_dataset(config, Split.HELD_OUT)
    """
    dataset: Dataset | StreamDataset = DATASETS.load(config.type)(config, split)
    if check is not None and isinstance(dataset, CheckedDataset):
        dataset.check_every(check)
    if isinstance(dataset, Dataset) and len(dataset) == 0:
        remedy = (
            "a larger `held_out`, or eval.num_prompts = 0"
            if split is Split.HELD_OUT
            else "a smaller `held_out`"
        )
        raise DataError(f"dataset {config.type!r} has no {split} prompts: give it more rows, {remedy}")
    return dataset


def open_indexed(config: PartConfig, split: Split = Split.TRAIN) -> Dataset:
    """open_dataset for callers that need random access."""
    dataset = open_dataset(config, split)
    if not isinstance(dataset, Dataset):
        raise DataError(f"dataset {config.type!r} can only be read forwards: use an indexable one here")
    return dataset


def place_of(key: str) -> int:
    """Where a problem lies in 0 … 2^64 − 1: the held-out side is the lower end."""
    digest = hashlib.blake2b(key.encode(), digest_size=8, person=b"rill-split").digest()
    return int.from_bytes(digest, "little")


def on_side(key: str, held_out: float, split: Split) -> bool:
    """Whether a problem lies on this side. `key` is its content; equal keys are on the same side for ever."""
    return split is Split.ALL or (place_of(key) < held_out * 2.0**64) is (split is Split.HELD_OUT)


def check_has_side(name: str, split: Split, held_out: float) -> None:
    """For sources that would look for a held-out problem until they find one."""
    if split is Split.HELD_OUT and held_out == 0.0:
        raise DataError(f"{name}: `held_out` is 0, so there is no held-out side: set it to e.g. 0.1")


def content_key(prompt: Prompt) -> str:
    """What makes two prompts the same problem: the words and pictures put to the model."""
    if prompt.messages:
        return "\x1e".join(
            f"{m.role}\x1f{m.content}" + "".join(hashlib.blake2b(file).hexdigest() for file in m.pictures)
            for m in prompt.messages
        )
    return prompt.text or ""


def prompts_of(dataset: Dataset, limit: int | None = None) -> Iterator[Prompt]:
    for index in range(len(dataset) if limit is None else min(limit, len(dataset))):
        yield dataset[index]


def solution_of(prompt: Prompt) -> str:
    """The response an expert would write: `metadata["solution"]`, else the answer itself."""
    solution: Any = prompt.metadata.get("solution", prompt.answer)
    if not isinstance(solution, str) or not solution:
        raise DataError(
            f"prompt {prompt.id} has no written solution (got {solution!r}): SFT needs "
            "metadata['solution'], a text answer, or rows with messages"
        )
    return solution


def check_template(name: str, template: str, fields: tuple[str, ...], needs: tuple[str, ...]) -> None:
    """A template must hold one of `needs`, and no field but `fields`."""
    try:
        template.format(**dict.fromkeys(fields, ""))
    except (KeyError, IndexError, ValueError) as error:
        known = ", ".join(f"{{{field}}}" for field in fields)
        raise ValueError(
            f"`{name}` cannot be filled in ({type(error).__name__}: {error}): its fields are {known}; write {{{{ and "
            "}} for braces that are meant as such"
        ) from error
    if not any(f"{{{field}}}" in template for field in needs):
        raise ValueError(f"`{name}` must hold {' or '.join(f'{{{n}}}' for n in needs)}, got {template!r}")
