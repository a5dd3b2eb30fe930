"""Rows of a file become Prompts. Every common shape is recognised, and a bad row is named by file and number.

verl                data_source, prompt [messages], ability, reward_model {style, ground_truth}, extra_info
messages            messages [{role, content}], answer?        a last assistant message is the written solution
prompt/completion   prompt (text or messages), completion, answer?
question/answer     question, answer                           names can be set
preference          prompt, chosen, rejected, margin?          or two conversations that differ in their last message
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from rill.data.base import DatasetConfig, Split, check_template, content_key, place_of
from rill.data.index import RowIndex
from rill.data.messages import read_message
from rill.errors import DataError
from rill.types import Message, Prompt

QUESTION_NAMES = ("question", "problem", "prompt", "instruction", "query")
ANSWER_NAMES = ("answer", "ground_truth", "final_answer", "target", "label")
SOLUTION_NAMES = ("completion", "response", "output", "solution")
ROLES = ("system", "developer", "user", "assistant", "tool")
CHOSEN, REJECTED, MARGIN = "chosen", "rejected", "margin"
"""Of a preference, in the row and in the prompt's metadata."""


class QuestionConfig(DatasetConfig):
    """How a question becomes a prompt."""

    form: Literal["chat", "bare"] = "chat"
    """How a plain question is put: as a user message, or as plain text."""
    template: str = "{question}"
    """How a plain question is written."""
    system: str = ""
    """A system message before questions that have none. Empty: none."""
    task: str = ""
    """Task name of the prompts. Empty: the row's own `data_source` or `task`, else its source's name."""

    @model_validator(mode="after")
    def _template_has_its_field(self) -> QuestionConfig:
        check_template("template", self.template, ("question",), ("question",))
        return self


class RowConfig(QuestionConfig):
    """Where a row has its question and its answer."""

    question: str = ""
    """Name of the question's field. Empty: the first found of question, problem, prompt, instruction, query."""
    answer: str = ""
    """Name of the answer's field. Empty: the first found of answer, ground_truth, final_answer, target, label."""
    answer_after: str = ""
    """Only what follows the last of these marks is the answer ("####" for GSM8K). Empty: the whole field."""


class SequenceConfig(RowConfig):
    """Of rows that come one after another: files and streams."""

    limit: int = Field(default=0, ge=0)
    """Use only the first so many rows. 0: all."""


class RowDataset(ABC):
    """Rows that can be read by number. All are validated when the dataset is opened, each by one of the processes that
    open it (rill.data.index); none is kept in memory."""

    def __init__(self, config: SequenceConfig, split: Split) -> None:
        self.rows = config
        self.split = split
        self._numbers: Sequence[int] | npt.NDArray[np.int64] = ()
        self.digests: Mapping[str, str] = {}

    @abstractmethod
    def num_rows(self) -> int: ...

    @abstractmethod
    def row(self, number: int) -> Any:
        """Row `number`, counted from 0."""

    @abstractmethod
    def where(self, number: int) -> str:
        """File and row number as a person counts them."""

    @property
    @abstractmethod
    def title(self) -> str:
        """A short name for ids, the same on every machine."""

    def index_rows(self, index: RowIndex) -> None:
        """See to it that every row is validated, and find those on this side. Called at the end of __init__."""
        self.digests, self._index = index.digests(), index
        count = self._num_used()
        places = index.of_every_row(_parsing_of(self.rows), count, self._place)
        if self.split is Split.ALL or (self.split is Split.TRAIN and self.rows.held_out == 0.0):
            self._numbers = range(count)
        else:
            is_held_out = places < np.uint64(math.ceil(self.rows.held_out * 2.0**64))
            self._numbers = np.flatnonzero(is_held_out == (self.split is Split.HELD_OUT))

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompt(int(self._numbers[index]))

    def check_every(self, check: Callable[[Prompt], object]) -> None:
        """Of both sides; the DataError of a row that does not pass names its place."""

        def checked(number: int) -> int:
            try:
                check(self._prompt(number))
            except DataError as error:
                raise DataError(f"{self.where(number)}: {error}") from None
            return 0

        name = f"{_parsing_of(self.rows)}-{check.__module__}.{check.__name__}"
        self._index.of_every_row(name, self._num_used(), checked)

    def _num_used(self) -> int:
        return min(self.rows.limit or self.num_rows(), self.num_rows())

    def _place(self, number: int) -> int:
        return place_of(content_key(self._prompt(number)))

    def _prompt(self, number: int) -> Prompt:
        where = self.where(number)
        return prompt_from_row(self.row(number), self.rows, where=where, row_id=f"{self.title}/{number}")


def _parsing_of(config: RowConfig) -> str:
    """A name for how rows are read: what was found out by other settings, or by other code, does not count."""
    settings = config.model_dump_json(exclude={"held_out", "task", "path"})
    return hashlib.blake2b(settings.encode() + Path(__file__).read_bytes(), digest_size=8).hexdigest()


def prompt_from_row(row: Any, config: RowConfig, *, where: str, row_id: str) -> Prompt:
    """One validated Prompt, or a DataError that begins with `where`."""
    if isinstance(row, Prompt):
        return row
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: a row must be a table of fields, got {type(row).__name__}")
    row = {key: _plain(value) for key, value in row.items()}
    if CHOSEN in row or REJECTED in row:
        return _from_preference(row, config, where, row_id)
    if isinstance(row.get("messages"), list):
        return _from_messages(row, config, where, row_id)
    return _from_question(row, config, where, row_id)


def _from_preference(row: dict[str, Any], config: RowConfig, where: str, row_id: str) -> Prompt:
    talks = [_reply(row.get(name), f"{where}: `{name}`") for name in (CHOSEN, REJECTED)]
    (before, chosen), (also_before, rejected) = talks
    if before != also_before:
        raise DataError(f"{where}: `chosen` and `rejected` must differ in their last message only")
    if chosen == rejected:
        raise DataError(f"{where}: `chosen` and `rejected` are the same")
    rest = {key: value for key, value in row.items() if key not in (CHOSEN, REJECTED)}
    if before:
        if before[-1].role == "assistant":
            raise DataError(f"{where}: `chosen` ends with two assistant messages")
        rest["messages"] = list(before)
    prompt = prompt_from_row(rest, config, where=where, row_id=row_id)
    pair = {CHOSEN: chosen, REJECTED: rejected, MARGIN: _number(row, MARGIN, where) or 0.0}
    return replace(prompt, metadata={**prompt.metadata, **pair})


def _reply(value: Any, where: str) -> tuple[tuple[Message, ...], str]:
    """(the conversation before it, the answer) of a text or of messages that end with the assistant's."""
    if not value:
        raise DataError(f"{where} is missing or empty")
    if isinstance(value, str):
        return (), value
    messages = parse_messages(value, where)
    if messages[-1].role != "assistant":
        raise DataError(f"{where} must end with an assistant message, got {messages[-1].role!r}")
    return messages[:-1], _text(messages[-1], where)


def _text(message: Message, where: str) -> str:
    """Of an answer that is kept as text."""
    if message.tool_calls or message.pictures or not message.content:
        raise DataError(f"{where}: an answer must be text here, without tool calls or pictures")
    return message.content


def _from_messages(row: dict[str, Any], config: RowConfig, where: str, row_id: str) -> Prompt:
    messages = parse_messages(row["messages"], where)
    metadata = _metadata(row)
    if messages[-1].role == "assistant":
        messages, reply = messages[:-1], messages[-1]
        metadata["reply"] = reply
        metadata["solution"] = reply.content
        if not messages:
            raise DataError(f"{where}: `messages` holds only an assistant message: nothing is asked")
    answer = _answer(row, config, where)
    return Prompt(
        id=_id(row, row_id),
        messages=_with_system(messages, config),
        answer=metadata.get("solution") if answer is None else answer,
        task=_task(row, config, row_id),
        difficulty=_number(row, "difficulty", where),
        metadata=metadata,
    )


def _from_question(row: dict[str, Any], config: RowConfig, where: str, row_id: str) -> Prompt:
    name = config.question or next((n for n in QUESTION_NAMES if row.get(n)), "")
    asked = row.get(name)
    if not asked:
        wanted = f"{name!r}" if name else f"one of {', '.join(QUESTION_NAMES)}, or messages"
        filled = ", ".join(str(key) for key, value in row.items() if value) or "nothing"
        raise DataError(f"{where}: no question: needs {wanted}; filled in the row: {filled}")
    text: str | None = None
    if isinstance(asked, list):
        messages = parse_messages(asked, where)
    elif isinstance(asked, str):
        text = config.template.format(question=asked)
        messages = (Message(role="user", content=text),)
    else:
        raise DataError(f"{where}: {name!r} must be text or a list of messages, got {type(asked).__name__}")
    answer, metadata = _answer(row, config, where), _metadata(row)
    solution = _solution(row, config, where)
    if solution is not None:
        metadata["solution"] = solution
    is_bare = text is not None and config.form == "bare"
    return Prompt(
        id=_id(row, row_id),
        messages=() if is_bare else _with_system(messages, config),
        text=text if is_bare else None,
        answer=solution if answer is None else answer,
        task=_task(row, config, row_id),
        difficulty=_number(row, "difficulty", where),
        metadata=metadata,
    )


def parse_messages(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: messages must be a list with at least one message")
    return tuple(
        item if isinstance(item, Message) else _message(item, f"{where}: message {k}")
        for k, item in enumerate(value)
    )


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, Mapping) or item.get("role") not in ROLES:
        got = item.get("role") if isinstance(item, Mapping) else type(item).__name__
        raise DataError(f"{where} needs a role among {', '.join(ROLES)}, got {got!r}")
    where = f"{where} ({item['role']})"
    if item.get("content") is None and not item.get("tool_calls"):
        raise DataError(f"{where}: a message needs text content, got NoneType")
    try:
        return read_message(item)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def _answer(row: dict[str, Any], config: RowConfig, where: str) -> Any:
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping) and not config.answer:
        if "ground_truth" not in reward_model:
            raise DataError(f"{where}: `reward_model` has no `ground_truth`")
        answer = reward_model["ground_truth"]
    else:
        name = config.answer or next((n for n in ANSWER_NAMES if row.get(n) is not None), "")
        answer = row.get(name)
        if config.answer and answer is None:
            raise DataError(f"{where}: no field {config.answer!r}; the row has {', '.join(map(str, row))}")
    if config.answer_after and isinstance(answer, str):
        _, mark, tail = answer.rpartition(config.answer_after)
        if not mark:
            raise DataError(f"{where}: the answer has no {config.answer_after!r} in it: {answer[-80:]!r}")
        return tail.strip()
    return answer


def _solution(row: dict[str, Any], config: RowConfig, where: str) -> str | None:
    """The written solution: its own field, or the whole answer when only its end counts."""
    value = next((row[n] for n in SOLUTION_NAMES if row.get(n) is not None), None)
    if isinstance(value, list):
        messages = parse_messages(value, where)
        if len(messages) != 1 or messages[0].role != "assistant":
            raise DataError(f"{where}: a completion of messages must be one assistant message")
        return _text(messages[0], where)
    if value is None and config.answer_after:
        value = row.get(config.answer or next((n for n in ANSWER_NAMES if row.get(n) is not None), ""))
    return value if isinstance(value, str) else None


def _metadata(row: Mapping[str, Any]) -> dict[str, Any]:
    style = row["reward_model"].get("style") if isinstance(row.get("reward_model"), Mapping) else None
    fields = {"ability": row.get("ability"), "style": style, "tests": row.get("tests")}
    for name in ("extra_info", "metadata"):
        extra = row.get(name)
        if isinstance(extra, Mapping):
            fields.update(extra)
    return {key: value for key, value in fields.items() if value not in (None, "", {}, [])}


def _with_system(messages: tuple[Message, ...], config: RowConfig) -> tuple[Message, ...]:
    if config.system and messages[0].role != "system":
        return (Message(role="system", content=config.system), *messages)
    return messages


def _id(row: Mapping[str, Any], row_id: str) -> str:
    own = row.get("id")
    return str(own) if isinstance(own, str | int) and own != "" else row_id


def _task(row: Mapping[str, Any], config: RowConfig, row_id: str) -> str:
    return config.task or str(row.get("data_source") or row.get("task") or row_id.rpartition("/")[0])


def _number(row: Mapping[str, Any], name: str, where: str) -> float | None:
    value = row.get(name)
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{where}: `{name}` must be a number, got {value!r}")
    return number


def _plain(value: Any) -> Any:
    """Arrays (as parquet gives them) to lists, and JSON text in a messages field to what it says."""
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, str) and value.startswith('[{"role"'):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value
