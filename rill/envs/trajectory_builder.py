"""Writes a trajectory token by token and keeps its invariants, so that no environment handles masks by hand.

prompt      turn 0, mask 0, version NOT_SAMPLED, logprob 0
sampled     mask 1, the versions and log-probabilities the engine reported
observation mask 0, version NOT_SAMPLED, logprob 0: what a tool or the world said
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rill.errors import InvalidSampleError
from rill.types import NOT_SAMPLED, Prompt, StopReason, TokenIds, Trajectory, Turn

if TYPE_CHECKING:
    from rill.inference.base import Completion


class TrajectoryBuilder:
    """One episode in the making. `token_ids` is what the policy is asked to continue."""

    def __init__(self, prompt: Prompt, token_ids: TokenIds, *, trajectory_id: str, group_id: str) -> None:
        self.prompt = prompt
        self.trajectory_id = trajectory_id
        self.group_id = group_id
        self._ids: list[TokenIds] = []
        self._logprobs: list[Any] = []
        self._versions: list[Any] = []
        self._mask: list[Any] = []
        self._turns: list[Turn] = []
        self._experts: list[Any] = []
        self._num_tokens = 0
        self._num_sampled = 0
        self._stop_reason = StopReason.EOS
        self.add_unsampled(token_ids, role="prompt")

    @property
    def token_ids(self) -> TokenIds:
        return np.concatenate(self._ids)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def num_sampled(self) -> int:
        return self._num_sampled

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._turns)

    def add_sampled(self, completion: Completion, text: str = "", *, trained: bool = True) -> None:
        """What the policy wrote, exactly as the engine reported it."""
        length = len(completion.token_ids)
        if len(completion.logprobs) != length or len(completion.versions) != length:
            raise InvalidSampleError(
                f"trajectory {self.trajectory_id}: the engine gave {length} tokens with {len(completion.logprobs)} "
                f"log-probabilities and {len(completion.versions)} versions"
            )
        if length and int(np.min(completion.versions)) < 0:
            raise InvalidSampleError(
                f"trajectory {self.trajectory_id}: the engine reported version {int(np.min(completion.versions))} "
                "for a sampled token: versions start at 0"
            )
        if length and not np.isfinite(completion.logprobs).all():
            raise InvalidSampleError(
                f"trajectory {self.trajectory_id}: the engine reported a log-probability that is not finite"
            )
        self._append(
            completion.token_ids, completion.logprobs, completion.versions, trained, "assistant", text
        )
        if completion.routed_experts is not None:
            self._experts.append((len(self._turns) - 1, completion.routed_experts))
        self._num_sampled += length
        self._stop_reason = completion.stop_reason

    def add_observation(
        self, token_ids: TokenIds, text: str = "", *, role: str = "tool", **metadata: Any
    ) -> None:
        """What a tool or the world said; never trained on."""
        self.add_unsampled(token_ids, role=role, text=text, metadata=metadata)

    def add_unsampled(
        self, token_ids: TokenIds, *, role: str, text: str = "", metadata: Mapping[str, Any] | None = None
    ) -> None:
        length = len(token_ids)
        self._append(
            token_ids, np.zeros(length), np.full(length, NOT_SAMPLED), False, role, text, dict(metadata or {})
        )

    def finish(
        self,
        stop_reason: StopReason | None = None,
        *,
        error: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        """The trajectory. `stop_reason` is the last completion's unless given."""
        return Trajectory(
            id=self.trajectory_id,
            group_id=self.group_id,
            prompt_id=self.prompt.id,
            token_ids=self.token_ids,
            logprobs=np.concatenate(self._logprobs),
            versions=np.concatenate(self._versions),
            loss_mask=np.concatenate(self._mask),
            turn_ids=np.concatenate(
                [np.full(turn.end - turn.start, turn.index, dtype=np.int32) for turn in self._turns]
            ),
            turns=self.turns,
            stop_reason=StopReason.ERROR if error is not None else (stop_reason or self._stop_reason),
            error=error,
            metadata=dict(metadata or {}),
            routed_experts=self._routed_experts(),
        )

    def _append(
        self,
        token_ids: TokenIds,
        logprobs: Any,
        versions: Any,
        trained: bool,
        role: str,
        text: str,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        start, length = self._num_tokens, len(token_ids)
        self._ids.append(np.asarray(token_ids, dtype=np.int32))
        self._logprobs.append(np.asarray(logprobs, dtype=np.float32))
        self._versions.append(np.asarray(versions, dtype=np.int32))
        self._mask.append(np.full(length, trained, dtype=np.bool_))
        index = len(self._turns)
        self._turns.append(
            Turn(
                index=index,
                role=role,
                start=start,
                end=start + length,
                text=text,
                metadata=dict(metadata or {}),
            )
        )
        self._num_tokens += length

    def _routed_experts(self) -> Any:
        """[T, L, K]; -1 where no engine reported a choice."""
        if not self._experts:
            return None
        first = np.asarray(self._experts[0][1])
        whole = np.full((self._num_tokens, *first.shape[1:]), -1, dtype=np.int16)
        for turn_index, experts in self._experts:
            turn, experts = self._turns[turn_index], np.asarray(experts, dtype=np.int16)
            if len(experts) == turn.end - turn.start:
                whole[turn.start : turn.end] = experts
            elif len(experts) == turn.end:  # engines may report the prompt's choices too
                whole[: turn.end] = experts
            else:
                raise InvalidSampleError(
                    f"trajectory {self.trajectory_id}: routed experts for {len(experts)} tokens, the turn has "
                    f"{turn.end - turn.start} of {turn.end}"
                )
        return whole


def response_text(trajectory: Trajectory) -> str:
    """What the model said last: the text of the final assistant turn."""
    for turn in reversed(trajectory.turns):
        if turn.role == "assistant":
            return turn.text
    return ""
