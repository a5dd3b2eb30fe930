"""The tokens of one agent in one episode, as a tree that only grows: the one source of samples.

    prompt ── sampled ── observation ── sampled ── observation ── sampled          one leaf: one sample
                  │
                  └───── a rewritten history (dropped thoughts, a summary) ── sampled     a branch: another sample

prompt, observation   mask 0, version NOT_SAMPLED, log-probability 0
sampled               mask 1, the versions and log-probabilities the engine reported; never encoded again

Written by rill.envs.agent, read by rill.envs.episode. A sampled node that several leaves share is trained in the first.
A node knows the digest of all tokens up to its end, which names requests. The tokens of a path lie in one array, to
which the node that ends it appends: what a turn costs does not grow with the context.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rill.errors import InvalidSampleError
from rill.types import NOT_SAMPLED, Floats, Picture, StopReason, TokenIds, Trajectory, Turn

if TYPE_CHECKING:
    from rill.inference.base import Completion

DIGEST_BYTES = 12


class Strip:
    """The tokens of a path in one array, with room behind them."""

    __slots__ = ("end", "ids")

    def __init__(self, ids: TokenIds) -> None:
        self.ids = ids
        self.end = len(ids)

    def extended(self, start: int, new: TokenIds) -> Strip:
        """With `new` behind its first `start` tokens: this one where it ends there, else another. What was read of it
        stays as it was."""
        end = start + len(new)
        strip = self if start == self.end else Strip(self.ids[:start])
        if end > len(strip.ids):
            grown = np.empty(end + end // 2 + 256, dtype=np.int32)
            grown[:start] = strip.ids[:start]
            strip.ids = grown
        strip.ids[start:end] = new
        strip.end = end
        return strip


class Node:
    """A stretch of tokens written by one side."""

    __slots__ = (
        "_digest", "completion", "end", "hasher", "is_leaf", "is_trained", "metadata", "order", "parent",
        "pictures", "role", "strip", "text", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        parent: Node | None,
        token_ids: TokenIds,
        *,
        role: str,
        text: str = "",
        completion: Completion | None = None,
        is_trained: bool = False,
        order: int = 0,
        pictures: tuple[Picture, ...] = (),
    ) -> None:
        token_ids = np.ascontiguousarray(token_ids, dtype=np.int32)
        self.parent = parent
        self.token_ids = token_ids
        self.role = role
        self.text = text
        self.completion = completion
        """None: not sampled."""
        self.is_trained = is_trained
        self.order = order
        """Sampled nodes are numbered in the order in which they were finished, from 1."""
        self.metadata: dict[str, Any] = {}
        self.is_leaf = True
        self._digest: str | None = None
        if parent is None:
            self.pictures = pictures
            """Of every node from the start to this one."""
            self.end = len(token_ids)
            self.strip = Strip(token_ids)
            self.hasher = hashlib.blake2b(token_ids.data, digest_size=DIGEST_BYTES)
        else:
            self.pictures = parent.pictures + pictures
            self.end = parent.end + len(token_ids)
            self.strip = parent.strip.extended(parent.end, token_ids)
            self.hasher = parent.hasher.copy()
            self.hasher.update(token_ids.data)
            parent.is_leaf = False
        for picture in pictures:  # placeholders alone look all the same
            self.hasher.update(picture.key.encode())

    @property
    def digest(self) -> str:
        """Of every token from the start to the end of this node."""
        if self._digest is None:
            self._digest = self.hasher.hexdigest()
        return self._digest

    def path(self) -> list[Node]:
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def all_ids(self) -> TokenIds:
        """From the start to the end of this node. Not to be changed: others read the same array."""
        return self.strip.ids[: self.end]


class TokenTree:
    """Of one agent."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.num_sampled = 0
        self.num_rewritten = 0
        """Histories that did not go on where a reply ended."""
        self._rewards: list[tuple[int, float]] = []
        self._ends: list[Node] = []
        """The leaves that the samples were made of: an answer may still come when the episode is over."""

    # --- writing ------------------------------------------------------------------------------------------

    def observe(
        self,
        parent: Node | None,
        token_ids: TokenIds,
        *,
        role: str,
        text: str = "",
        pictures: tuple[Picture, ...] = (),
    ) -> Node:
        """A prompt, or what a tool or the world said; never trained on."""
        return self._add(Node(parent, token_ids, role=role, text=text, pictures=pictures))

    def sample(self, parent: Node, completion: Completion, text: str, *, is_trained: bool) -> Node:
        """What the policy wrote, exactly as the engine reported it."""
        length = len(completion.token_ids)
        if len(completion.logprobs) != length or len(completion.versions) != length:
            raise InvalidSampleError(
                f"request {completion.request_id}: the engine gave {length} tokens with {len(completion.logprobs)} "
                f"log-probabilities and {len(completion.versions)} versions"
            )
        self.num_sampled += 1
        return self._add(
            Node(
                parent,
                completion.token_ids,
                role="assistant",
                text=text,
                completion=completion,
                is_trained=is_trained,
                order=self.num_sampled,
            )
        )

    def reward(self, value: float, at: Node | None = None) -> None:
        """Given now, or for the turn that ended with `at`."""
        self._rewards.append((self.num_sampled if at is None else at.order, value))

    @property
    def has_rewards(self) -> bool:
        return bool(self._rewards)

    @property
    def total_reward(self) -> float:
        return sum(value for _, value in self._rewards)

    # --- finding where something goes on ------------------------------------------------------------------

    def grow(self, token_ids: TokenIds, pictures: tuple[Picture, ...] = ()) -> Node:
        """The node that ends these tokens: the longest known part of them, and what is new behind it. With pictures it
        is a prompt, which begins a path of its own unless it is known as it is."""
        token_ids = np.asarray(token_ids, dtype=np.int32)
        if pictures:
            made = Node(None, token_ids, role="prompt", pictures=pictures)
            known = [node for node in self.nodes if node.parent is None and node.digest == made.digest]
            self.num_rewritten += bool(self.nodes) and not known
            return known[0] if known else self._add(made)
        parent = self._longest_prefix(token_ids)
        if parent is not None and parent.end == len(token_ids) and parent.completion is None:
            return parent
        if parent is None or not parent.is_leaf:
            self.num_rewritten += bool(self.nodes)
        rest = token_ids if parent is None else token_ids[parent.end :]
        return self.observe(parent, rest, role="prompt" if parent is None else "user")

    def _longest_prefix(self, token_ids: TokenIds) -> Node | None:
        best: Node | None = None
        for leaf in [node for node in self.nodes if node.is_leaf]:
            known = leaf.all_ids()
            length = min(len(known), len(token_ids))
            differs = np.flatnonzero(known[:length] != token_ids[:length])
            same = int(differs[0]) if differs.size else length
            node: Node | None = leaf
            while node is not None and node.end > same:
                node = node.parent
            if node is not None and (best is None or node.end > best.end):
                best = node
        return best

    def _add(self, node: Node) -> Node:
        self.nodes.append(node)
        return node

    # --- samples ------------------------------------------------------------------------------------------

    def leaves(self) -> list[Node]:
        """The last sampled node of every path, in the order of the tree; a path on which nothing was sampled counts
        only where there is no other."""
        found: dict[int, Node] = {}
        unsampled: Node | None = None
        for leaf in (node for node in self.nodes if node.is_leaf):
            node: Node | None = leaf
            while node is not None and node.completion is None:
                node = node.parent
            if node is None:
                unsampled = unsampled or leaf
            else:
                found.setdefault(id(node), node)
        # A path may end inside of another one, where an observation was appended that nobody answered.
        inner = {id(step) for node in found.values() for step in node.path()[:-1]}
        tips = [node for key, node in found.items() if key not in inner]
        return tips or ([unsampled] if unsampled is not None else [])

    def rewarded(self, samples: Sequence[Trajectory], **fields: Any) -> list[Trajectory]:
        """What `samples` gave, with the rewards that came since."""
        total = self.total_reward
        return [
            replace(sample, reward=total, rewards=self._token_rewards(leaf.path()), **fields)
            for sample, leaf in zip(samples, self._ends, strict=True)
        ]

    def samples(self, sample_id: str, **fields: Any) -> list[Trajectory]:
        """One trajectory per leaf, without rewards. `fields`: group_id, prompt_id and what else they have in common."""
        leaves, trained = self.leaves(), set[int]()
        self._ends = leaves
        out = []
        for number, leaf in enumerate(leaves):
            name = sample_id if len(leaves) == 1 else f"{sample_id}.{number}"
            out.append(self._sample(name, leaf.path(), trained, fields))
            trained.update(id(node) for node in leaf.path())
        return out

    def _sample(
        self, sample_id: str, path: list[Node], trained: set[int], fields: Mapping[str, Any]
    ) -> Trajectory:
        total = path[-1].end
        logprobs = np.zeros(total, np.float32)
        versions = np.full(total, NOT_SAMPLED, np.int32)
        mask = np.zeros(total, np.bool_)
        turns, start = [], 0
        for index, node in enumerate(path):
            end = node.end
            if (completion := node.completion) is not None:
                logprobs[start:end] = completion.logprobs
                versions[start:end] = completion.versions
                if node.is_trained and id(node) not in trained:
                    mask[start:end] = True
            turns.append(
                Turn(
                    index=index, role=node.role, start=start, end=end, text=node.text, metadata=node.metadata
                )
            )
            start = end
        check_sampled([node.completion for node in path if node.completion is not None])
        last = path[-1].completion
        common = {"stop_reason": last.stop_reason if last else StopReason.ERROR, **fields}
        return Trajectory(
            id=sample_id,
            token_ids=path[-1].all_ids(),
            logprobs=logprobs,
            versions=versions,
            loss_mask=mask,
            turn_ids=np.repeat(np.arange(len(path), dtype=np.int32), [len(node.token_ids) for node in path]),
            turns=tuple(turns),
            routed_experts=_routed_experts(path, sample_id),
            pictures=path[-1].pictures,
            **common,
        )

    def _token_rewards(self, path: list[Node]) -> Floats | None:
        """Every reward at the end of the last turn on this path that was finished when it was given; one that came
        before the first, in another branch, is nobody's here and stands before it. None: all came after the last."""
        sampled = [node for node in path if node.completion is not None]
        if not sampled or all(order >= sampled[-1].order for order, _ in self._rewards):
            return None
        rewards = np.zeros(path[-1].end, np.float32)
        for order, value in self._rewards:
            node = next((node for node in reversed(sampled) if node.order <= order), sampled[0].parent)
            assert node is not None, "what is sampled continues something"
            rewards[node.end - 1] += value
        return rewards


def check_sampled(completions: Sequence[Completion]) -> None:
    """What engines reported are versions, and finite numbers."""
    if not completions:
        return
    logprobs = np.concatenate([completion.logprobs for completion in completions])
    versions = np.concatenate([completion.versions for completion in completions])
    # One number that is not finite makes the sum so.
    if math.isfinite(np.add.reduce(logprobs)) and np.minimum.reduce(versions, initial=0) >= 0:
        return
    for completion in completions:
        if not np.isfinite(completion.logprobs).all():
            what = "a log-probability that is not finite"
        elif (completion.versions < 0).any():
            what = f"version {completion.versions.min()} for a sampled token: versions start at 0"
        else:
            continue
        raise InvalidSampleError(f"request {completion.request_id}: the engine reported {what}")


def _routed_experts(path: list[Node], sample_id: str) -> Any:
    """[T, L, K]; -1 where no engine reported a choice."""
    whole: Any = None
    for node in path:
        if node.completion is None or node.completion.routed_experts is None:
            continue
        experts = np.asarray(node.completion.routed_experts, dtype=np.int16)
        if whole is None:
            whole = np.full((path[-1].end, *experts.shape[1:]), -1, dtype=np.int16)
        if len(experts) == len(node.token_ids):
            whole[node.end - len(experts) : node.end] = experts
        elif len(experts) == node.end:  # engines may report the prompt's choices too
            whole[: node.end] = experts
        else:
            raise InvalidSampleError(
                f"sample {sample_id}: routed experts for {len(experts)} tokens, the turn has {len(node.token_ids)} "
                f"of {node.end}"
            )
    return whole
