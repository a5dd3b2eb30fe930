"""Every error rill raises on purpose, on one page, and the boundary that turns one into a message.

A RillError is somebody's mistake or misfortune and says what was wrong, what was got and how to mend it.
A bug of rill's own is an AssertionError and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RillError(Exception):
    """Base of all. `exit_code` is what a command ends with when nothing catches it."""

    exit_code = 1


# --- what the user gave us --------------------------------------------------------------------------------


class UserError(RillError):
    """The input is wrong; running it again unchanged will fail again."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration file, key or value."""


class UnknownNameError(UserError):
    """A name that no registry knows; the message lists those it does."""


class MissingExtraError(UserError):
    """An optional library is not installed; the message holds the install line."""


class PlanError(UserError):
    """A placement or plan that cannot be carried out."""


class DataError(UserError):
    """A dataset, row or prompt that cannot be used."""


class InvalidSampleError(UserError):
    """A trajectory or sample whose fields contradict each other."""


class RequestError(UserError):
    """A generation request that no engine could answer: bad ids, too long, contradicting parameters."""


class TooLongError(RequestError):
    """A prompt, or an episode so far, that does not fit the engine's context. In a run it costs that sample only."""


class AccessError(RequestError):
    """A server that does not take the key it was given, or wants one."""


class UnsupportedError(UserError):
    """This engine, backend or device does not have the feature that was asked for."""


class UnpicklableError(UserError):
    """An object that cannot travel between processes; the message holds the path to the part at fault."""


class ModelError(UserError):
    """A model that cannot be loaded, or does not fit its tokenizer or its use."""


# --- what happened while running --------------------------------------------------------------------------


class RunError(RillError):
    """The run met something that its configuration could not have foreseen."""


class WorkerError(RunError):
    """An exception inside a worker; carries the remote traceback, the group and the rank."""

    def __init__(self, message: str, *, group: str, rank: int, remote_traceback: str) -> None:
        super().__init__(message)
        self.group = group
        self.rank = rank
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[object, ...]:
        args = (self.args[0], self.group, self.rank, self.remote_traceback)
        return (_rebuild_worker_error, args, self.__dict__)  # with its notes

    @property
    def headline(self) -> str:
        return f"{self.group}[{self.rank}]: {self.args[0]}"

    def __str__(self) -> str:
        return f"{self.headline}\n{self.remote_traceback}".rstrip()


def _rebuild_worker_error(message: str, group: str, rank: int, remote_traceback: str) -> WorkerError:
    return WorkerError(message, group=group, rank=rank, remote_traceback=remote_traceback)


class PeerDiedError(RunError):
    """The process at the other end of a call, transfer or channel is gone; the message names it."""


class StuckError(RunError):
    """A wait passed its deadline; the message says who waits for whom on what."""


class ChannelClosedError(RunError):
    """A put or take on a channel that is closed."""


class EngineError(RunError):
    """An inference engine failed at something it should have been able to do."""


class EngineDiedError(EngineError):
    """An inference engine that failed for good: nothing that it is asked will be answered any more."""


class WeightSyncError(RunError):
    """Weights that arrived incomplete, damaged, out of order or not at all."""


class StaleWeightsError(WeightSyncError):
    """An engine answers with other weights than its version says."""


class TrainingError(RunError):
    """An update that must not be applied: NaN loss, empty batch, mismatched sizes."""


class CheckpointError(RunError):
    """A checkpoint that is missing, damaged or belongs to another run."""


class JournalError(RunError):
    """The token log cannot be written."""


class GuardError(RunError):
    """A guard whose action is to stop the run."""


def mistake_behind(error: RillError) -> UserError | None:
    """The user's mistake that an error is, or that a worker found and reported with it; None for a misfortune."""
    found = first_found(error)
    cause = found.__cause__ if isinstance(found, WorkerError) else found
    return cause if isinstance(cause, UserError) else None


def first_found(error: RillError) -> RillError:
    """That of the worker where it began, behind those of the workers that called it; itself where none is behind."""
    while isinstance(error, WorkerError) and isinstance(error.__cause__, WorkerError):
        error = error.__cause__
    return error


def in_words(error: BaseException) -> str:
    """Its class and its text, where it has one, fit to travel: also where its `__str__` raises."""
    try:
        text = error.headline if isinstance(error, WorkerError) else str(error)
    except Exception as broken:  # noqa: BLE001  boundary: classes of users
        text = f"(its text cannot be had: {type(broken).__name__} in __str__)"
    name = type(error).__name__
    return f"{name}: {text}".encode("utf-8", "replace").decode() if text else name


@contextmanager
def boundary(where: str) -> Iterator[None]:
    """Name the place a RillError passed through, keeping its type and traceback.

    >>> with boundary("recipes/demo.toml"):
    ...     load()
    """
    try:
        yield
    except RillError as error:
        error.add_note(f"in {where}")
        raise
