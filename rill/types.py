"""The vocabulary of rill: what travels from a prompt to a gradient.

Every room speaks in these records and none of them owns behaviour. They are frozen; per-token fields are
NumPy arrays of one length, so that a record crosses a process boundary as raw buffers.

Axes: T token of one sequence, L layer, K expert choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, NewType, overload

import numpy as np
import numpy.typing as npt

from rill.errors import InvalidSampleError

TokenIds = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Bits = npt.NDArray[np.bool_]
Pixels = npt.NDArray[np.uint8]

PolicyVersion = NewType("PolicyVersion", int)
"""Counts what the trainer published: 0 is whatever an engine loaded by itself, 1 the trainer's weights at the start of
a run, and each training step adds one. A version never goes down."""

NOT_SAMPLED = PolicyVersion(-1)
"""The version of a token that no policy made: prompts and observations."""


class StopReason(StrEnum):
    """Why a sequence ended."""

    EOS = "eos"  # the model's own end-of-sequence token
    STOP = "stop"  # a stop string or stop token id of the request
    LENGTH = "length"  # max_new_tokens or the context was used up
    ABORTED = "aborted"  # taken back by the caller; the tokens so far are kept
    ERROR = "error"  # the environment, a tool or the reward failed; see Trajectory.error


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one completion. Every default is "off" except the length limit."""

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    """End-of-sequence and stop ids are forbidden before this many tokens. 0: off."""
    temperature: float = 1.0
    """0 is greedy. Log-probabilities are reported after the temperature (see inference.base)."""
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """The same seed, prompt and weights give the same tokens whatever else is in the batch."""


PICTURE = "\ufffc"
"""Stands in a message's content where a picture is: Unicode's own character for an object among letters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message, as the OpenAI API has it."""

    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str | None = None
    pictures: tuple[bytes, ...] = ()
    """Files as they are (PNG, JPEG, WebP), one for each PICTURE in the content, in that order."""

    def __post_init__(self) -> None:
        if self.pictures and self.content.count(PICTURE) != len(self.pictures):
            raise InvalidSampleError(
                f"a message has {len(self.pictures)} pictures and {self.content.count(PICTURE)} places for them: put "
                "rill.types.PICTURE into its content where each one belongs"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture in a sequence of tokens, where rows × columns placeholders stand for it.

    It travels as the file it came in; whoever runs the model cuts it into patches (rill.models.pictures).
    """

    key: str
    """Hash of the file: what caches, logs and the viewer call it."""
    data: bytes
    rows: int
    columns: int
    start: int = 0
    """Where its first placeholder stands. A field, never found again in the tokens: a model may sample placeholders."""

    @property
    def file_name(self) -> str:
        """In `media/` of a run folder, where the pictures of logged rollouts lie."""
        kinds = {b"\xff\xd8\xff": "jpg", b"RIFF": "webp", b"GIF8": "gif"}
        kind = next((kind for start, kind in kinds.items() if self.data.startswith(start)), "png")
        return f"{self.key}.{kind}"

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem to be answered: what a dataset yields."""

    id: str
    messages: tuple[Message, ...] = ()
    text: str | None = None
    """Used as it is, without a chat template, when there are no messages."""
    answer: Any = None
    """Ground truth for the reward; its form belongs to the task."""
    task: str = ""
    difficulty: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A stretch of one trajectory written by one side: the half-open token range [start, end)."""

    index: int
    role: str
    start: int
    end: int
    text: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Failure(StrEnum):
    """Why an episode has no reward that could be trained on."""

    SETUP = "setup"  # its session could not be made, or not in time
    ENVIRONMENT = "environment"  # the environment raised
    TIMEOUT = "timeout"  # a turn, or the whole episode, took too long
    TOO_LONG = "too_long"  # the prompt alone does not fit the engine's context
    REWARD = "reward"  # a reward raised, hung or gave no number
    NO_REWARD = "no_reward"  # nobody gave a reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sample, token by token: prompt, sampled tokens and observations in the order the model saw them.

    Most episodes are one. Branches, rewritten histories and several agents give several (see Episode).
    """

    id: str
    group_id: str
    prompt_id: str
    token_ids: TokenIds
    logprobs: Floats
    """log μ of sampled tokens as the engine reported it; 0 elsewhere."""
    versions: Ints
    """The policy version that sampled each token; NOT_SAMPLED elsewhere."""
    loss_mask: Bits
    """True where the token is trained on. A field, never inferred."""
    turn_ids: Ints
    """Index into turns; the prompt is turn 0."""
    turns: tuple[Turn, ...] = ()
    stop_reason: StopReason = StopReason.EOS
    reward: float = 0.0
    """All that its agent was given in the episode, the same on every sample of it. Means nothing with `error`."""
    rewards: Floats | None = None
    """By token, where not all of it came at the end: sums to `reward`, and what stands at and behind a token is what
    was given after it was sampled, also where the episode went on in another sample."""
    agent: str = "policy"
    episode_id: str = ""
    """Several samples of one episode share it. Empty: the sample is the episode."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    """What failed, when the environment or the reward failed. Such a trajectory is data, not a crash."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    routed_experts: npt.NDArray[np.int16] | None = None
    """[T, L, K], for routing replay; None where the engine does not record them."""
    pictures: tuple[Picture, ...] = ()
    """In the order of the tokens."""

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name in ("logprobs", "versions", "loss_mask", "turn_ids", "routed_experts", "rewards"):
            values = getattr(self, name)
            if values is not None and len(values) != length:
                raise InvalidSampleError(
                    f"trajectory {self.id}: {name} has {len(values)} entries for {length} tokens"
                )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        return int(np.count_nonzero(self.versions != NOT_SAMPLED))

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the first sampled one."""
        sampled = np.flatnonzero(self.versions != NOT_SAMPLED)
        return int(sampled[0]) if sampled.size else self.num_tokens

    @property
    def oldest_version(self) -> PolicyVersion:
        """The oldest policy with a token in it; NOT_SAMPLED when nothing was sampled."""
        sampled = self.versions[self.versions != NOT_SAMPLED]
        return PolicyVersion(int(sampled.min())) if sampled.size else NOT_SAMPLED

    @property
    def is_truncated(self) -> bool:
        return self.stop_reason is StopReason.LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One run of an environment: what its agents said and were given. A failed one is data and never trained as 0."""

    id: str
    group_id: str
    prompt_id: str
    samples: tuple[Trajectory, ...]
    """At least one, those of the first agent first; a sampled token is in the loss mask of one of them at most, and of
    none in a failed episode, unless algorithm.filters.train_failed asks for it."""
    rewards: Mapping[str, float]
    """By agent, the first being the one that `reward` means. Empty in a failed episode."""
    failure: Failure | None = None
    error: str | None = None
    """What failed, with the user's file and line."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """turns, tool_calls, branches, …: to be averaged over episodes."""

    @property
    def reward(self) -> float:
        """The first agent's; 0 in a failed episode, which no caller may mistake for a score."""
        return next(iter(self.rewards.values()), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The samples of one prompt. Identity is the id, never an order."""

    id: str
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        for trajectory in self.trajectories:
            if trajectory.group_id != self.id:
                raise InvalidSampleError(
                    f"trajectory {trajectory.id} says group {trajectory.group_id!r} but lies in {self.id!r}"
                )

    @property
    def rewards(self) -> Floats:
        return np.array([t.reward for t in self.trajectories], dtype=np.float32)

    @property
    def num_tokens(self) -> int:
        return sum(t.num_tokens for t in self.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A trajectory as the trainer sees it. Per-token fields align with trajectory.token_ids.

    The value at position t belongs to the token at t: its log-probability given everything before it.
    Fields that are None have not been computed (yet), or the algorithm does not need them.
    """

    trajectory: Trajectory
    advantages: Floats
    """0 where the loss mask is off."""
    old_logprobs: Floats | None = None
    ref_logprobs: Floats | None = None
    teacher_logprobs: Floats | None = None
    values: Floats | None = None
    returns: Floats | None = None
    energies: Floats | None = None
    """1 − 2π(a) + Σ_v π(v)² under the old policy, for optimal-token baselines."""
    is_logged: bool = False
    """People can see it (rill.telemetry.rollout_log): the trainer adds what it knows of its tokens."""

    def __post_init__(self) -> None:
        length = self.trajectory.num_tokens
        for name in (
            "advantages", "old_logprobs", "ref_logprobs", "teacher_logprobs", "values", "returns", "energies"
        ):  # fmt: skip
            values = getattr(self, name)
            if values is not None and len(values) != length:
                raise InvalidSampleError(
                    f"sample {self.trajectory.id}: {name} has {len(values)} entries for {length} tokens"
                )

    @property
    def id(self) -> str:
        return self.trajectory.id

    @property
    def num_tokens(self) -> int:
        return self.trajectory.num_tokens


# --- robots -----------------------------------------------------------------------------------------------


class InitialState(NamedTuple):
    """Where an episode of a robot begins, by name: the same name is the same scene in every process."""

    suite: str
    """The simulator, or the family of tasks."""
    task: str
    state_id: int

    @property
    def name(self) -> str:
        return f"{self.suite}/{self.task}/{self.state_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RobotSpec:
    """The shapes of a robot, which a policy must fit."""

    state_size: int
    action_size: int
    cameras: tuple[str, ...] = ()
    image_size: int = 0
    """Pixels of a camera's side."""
    tasks: tuple[str, ...] = ()
    """Names that an InitialState may carry; empty: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a robot sees at one moment."""

    state: Floats
    """[S]: joints, poses, whatever the simulator measures."""
    images: Mapping[str, Pixels] = field(default_factory=dict)
    """By camera: [height, width, 3]."""
    instruction: str = ""
    """What it is told to do."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observations(Sequence[Observation]):
    """Many of them, of one robot, as one array each."""

    states_NS: Floats
    images: Mapping[str, Pixels]
    """By camera: [N, height, width, 3]."""
    instructions: tuple[str, ...]

    @staticmethod
    def of(rows: Sequence[Observation]) -> Observations:
        if isinstance(rows, Observations):
            return rows
        return Observations(
            states_NS=np.stack([row.state for row in rows]) if rows else np.zeros((0, 0), np.float32),
            images={n: np.stack([row.images[n] for row in rows]) for n in (rows[0].images if rows else ())},
            instructions=tuple(row.instruction for row in rows),
        )

    @staticmethod
    def joined(parts: Sequence[Observations]) -> Observations:
        parts = [part for part in parts if len(part)]
        if not parts:
            return Observations.of(())
        return Observations(
            states_NS=np.concatenate([part.states_NS for part in parts]),
            images={name: np.concatenate([part.images[name] for part in parts]) for name in parts[0].images},
            instructions=tuple(text for part in parts for text in part.instructions),
        )

    def __len__(self) -> int:
        return len(self.instructions)

    @overload
    def __getitem__(self, index: int) -> Observation: ...
    @overload
    def __getitem__(self, index: slice) -> Observations: ...
    def __getitem__(self, index: int | slice) -> Observation | Observations:
        images = {name: image[index] for name, image in self.images.items()}
        if isinstance(index, slice):
            states_NS, texts = self.states_NS[index], self.instructions[index]
            return Observations(states_NS=states_NS, images=images, instructions=texts)
        return Observation(state=self.states_NS[index], images=images, instruction=self.instructions[index])


class Decision(NamedTuple):
    """What a policy does about some observations. Axes: B observation, J action of the chunk, A number of an action."""

    actions_BJA: Floats
    """In −1 … 1, as the simulator is given them."""
    latents: Mapping[str, npt.NDArray[Any]]
    """[B, …] each: what was drawn."""
    logprobs_BJ: Floats
    values_B: Floats
    clipped_B: Floats
    """Share of the numbers that had to be cut to −1 … 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbodiedTrajectory:
    """One episode of a robot, chunk by chunk: what it saw, did and got.

    A policy decides once a chunk and the simulator plays the chunk's actions; those behind the end of the episode were
    never executed. Axes: C chunk, J action of a chunk, A dimension of an action.
    """

    id: str
    group_id: str
    start: InitialState
    observations: Observations
    """[C]: what each chunk was decided on."""
    final: Observation
    """What it saw last; never the first of a next episode."""
    actions_CJA: Floats
    """As they were given to the simulator, in −1 … 1."""
    executed_CJ: Bits
    """Which of them it played."""
    latents: Mapping[str, npt.NDArray[Any]]
    """[C, …] each: what the policy drew (action tokens, the chain of a flow): its probability can be computed again."""
    logprobs_CJ: Floats
    """log μ of each action as the policy reported it."""
    values_C: Floats
    """As the policy estimated them."""
    versions_C: Ints
    rewards_CJ: Floats
    """0 where nothing was executed."""
    terminated: bool
    """The task is over; nothing comes after it."""
    truncated: bool
    """Cut off by the time limit; the task would have gone on."""
    success: bool
    clipped: float = 0.0
    """Share of the numbers in its actions that lay outside −1 … 1 and were cut."""
    error: str | None = None
    """What failed, where the simulator failed. Such an episode is data and never trained on."""

    @property
    def num_chunks(self) -> int:
        return len(self.observations)

    @property
    def num_actions(self) -> int:
        return int(self.executed_CJ.sum())

    @property
    def num_tokens(self) -> int:
        """What it counts in a batch: the actions that were executed."""
        return self.num_actions

    @property
    def reward(self) -> float:
        return float(self.rewards_CJ.sum())
