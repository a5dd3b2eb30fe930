"""The tokens of one agent in one episode, as a tree that only grows: the one source of samples.

    prompt ── sampled ── observation ── sampled ── observation ── sampled          one leaf: one sample
                  │
                  └───── a rewritten history (dropped thoughts, a summary) ── sampled     a branch: another sample

prompt, observation   mask 0, version NOT_SAMPLED, log-probability 0
sampled               mask 1, the versions and log-probabilities the engine reported; never encoded again

Written by rill.envs.agent, read by rill.envs.episode. A sampled node that several leaves share is trained in the first.
A node knows the digest of all tokens up to its end, which names requests, and the digest of the messages that it
answers, which finds the place where a conversation goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rill.errors import InvalidSampleError
from rill.types import NOT_SAMPLED, Floats, Message, Picture, StopReason, TokenIds, Trajectory, Turn

if TYPE_CHECKING:
    from rill.inference.base import Completion

DIGEST_BYTES = 12


class Node:
    """A stretch of tokens written by one side."""

    __slots__ = (
        "completion", "end", "hasher", "is_leaf", "is_trained", "metadata", "order", "parent",
        "pictures", "role", "text", "token_ids",
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
        self.parent = parent
        self.pictures: tuple[Picture, ...] = (parent.pictures if parent else ()) + pictures
        """Of every node from the start to this one."""
        self.token_ids = np.ascontiguousarray(token_ids, dtype=np.int32)
        self.role = role
        self.text = text
        self.completion = completion
        """None: not sampled."""
        self.is_trained = is_trained
        self.order = order
        """Sampled nodes are numbered in the order in which they were finished, from 1."""
        self.metadata: dict[str, Any] = {}
        self.is_leaf = True
        self.end: int = (parent.end if parent else 0) + len(token_ids)
        self.hasher: hashlib.blake2b = (
            parent.hasher.copy() if parent else hashlib.blake2b(digest_size=DIGEST_BYTES)
        )
        self.hasher.update(self.token_ids.data)
        for picture in pictures:  # placeholders alone look all the same
            self.hasher.update(picture.key.encode())
        if parent is not None:
            parent.is_leaf = False

    @property
    def digest(self) -> str:
        """Of every token from the start to the end of this node."""
        return self.hasher.hexdigest()

    def path(self) -> list[Node]:
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def all_ids(self) -> TokenIds:
        return np.concatenate([node.token_ids for node in self.path()])


class TokenTree:
    """Of one agent."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.num_sampled = 0
        self.num_rewritten = 0
        """Histories that did not go on where a reply ended."""
        self._rewards: list[tuple[int, float]] = []
        self._replies: dict[bytes, Node] = {}
        self._tip: tuple[Node, TokenIds] | None = None

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
        check_completion(completion)
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

    def note_reply(self, chain: bytes, node: Node) -> None:
        """The conversation that `chain` stands for ends with this reply."""
        self._replies[chain] = node

    def find_reply(self, chains: Sequence[bytes]) -> tuple[Node, int] | None:
        """The last of the messages (by their chains) that is a reply of this agent's, and its position."""
        for position in range(len(chains) - 1, -1, -1):
            node = self._replies.get(chains[position])
            if node is not None:
                return node, position
        return None

    def _longest_prefix(self, token_ids: TokenIds) -> Node | None:
        best: Node | None = None
        for leaf in [node for node in self.nodes if node.is_leaf]:
            known = self._ids_of(leaf)
            length = min(len(known), len(token_ids))
            differs = np.flatnonzero(known[:length] != token_ids[:length])
            same = int(differs[0]) if differs.size else length
            node: Node | None = leaf
            while node is not None and node.end > same:
                node = node.parent
            if node is not None and (best is None or node.end > best.end):
                best = node
        return best

    def _ids_of(self, leaf: Node) -> TokenIds:
        if self._tip is None or self._tip[0] is not leaf:
            self._tip = (leaf, leaf.all_ids())
        return self._tip[1]

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
        total, leaves = self.total_reward, self.leaves()
        return [
            replace(sample, reward=total, rewards=self._token_rewards(leaf.path()), **fields)
            for sample, leaf in zip(samples, leaves, strict=True)
        ]

    def samples(self, sample_id: str, **fields: Any) -> list[Trajectory]:
        """One trajectory per leaf, without rewards. `fields`: group_id, prompt_id and what else they have in common."""
        leaves, trained = self.leaves(), set[int]()
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
        turn_ids = np.zeros(total, np.int32)
        turns = []
        for index, node in enumerate(path):
            start = node.end - len(node.token_ids)
            turn_ids[start : node.end] = index
            if node.completion is not None:
                logprobs[start : node.end] = node.completion.logprobs
                versions[start : node.end] = node.completion.versions
                mask[start : node.end] = node.is_trained and id(node) not in trained
            turns.append(
                Turn(
                    index=index,
                    role=node.role,
                    start=start,
                    end=node.end,
                    text=node.text,
                    metadata=node.metadata,
                )
            )
        last = path[-1].completion
        common = {"stop_reason": last.stop_reason if last else StopReason.ERROR, **fields}
        return Trajectory(
            id=sample_id,
            token_ids=np.concatenate([node.token_ids for node in path]),
            logprobs=logprobs,
            versions=versions,
            loss_mask=mask,
            turn_ids=turn_ids,
            turns=tuple(turns),
            routed_experts=_routed_experts(path, sample_id),
            pictures=path[-1].pictures,
            **common,
        )

    def _token_rewards(self, path: list[Node]) -> Floats | None:
        """Every reward at the end of the last turn on this path that was finished when it was given. None: all of them
        came after the last."""
        sampled = [node for node in path if node.completion is not None]
        if not sampled or all(order >= sampled[-1].order for order, _ in self._rewards):
            return None
        rewards = np.zeros(path[-1].end, np.float32)
        for order, value in self._rewards:
            node = next((node for node in reversed(sampled) if node.order <= order), sampled[0])
            rewards[node.end - 1] += value
        return rewards


def check_completion(completion: Completion) -> None:
    """What an engine gave is whole: log-probabilities and versions for every token, and numbers among them."""
    length, name = len(completion.token_ids), completion.request_id
    if len(completion.logprobs) != length or len(completion.versions) != length:
        raise InvalidSampleError(
            f"request {name}: the engine gave {length} tokens with {len(completion.logprobs)} log-probabilities and "
            f"{len(completion.versions)} versions"
        )
    if length and (oldest := int(np.minimum.reduce(completion.versions))) < 0:
        raise InvalidSampleError(
            f"request {name}: the engine reported version {oldest} for a sampled token: versions start at 0"
        )
    if length and not math.isfinite(np.add.reduce(completion.logprobs)):  # one that is not makes the sum so
        raise InvalidSampleError(f"request {name}: the engine reported a log-probability that is not finite")


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


# --- messages ----------------------------------------------------------------------------------------------


def chain_of(before: bytes, message: Message) -> bytes:
    """The digest of a conversation that goes on with this message.

    Canonical: the order of a call's arguments, the ids of calls and an empty content make no difference, so that a
    client that writes a message anew is recognised.
    """
    hasher = hashlib.blake2b(before, digest_size=DIGEST_BYTES)
    hasher.update(message.role.encode())
    hasher.update(b"\0" + (message.content or "").encode("utf-8", "surrogatepass"))
    for file in message.pictures:
        hasher.update(b"\0" + hashlib.blake2b(file, digest_size=DIGEST_BYTES).digest())
    for call in message.tool_calls:
        function = call.get("function", {})
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            with contextlib.suppress(msgspec.DecodeError, UnicodeError):
                arguments = _decode(arguments)
        hasher.update(f"\0{function.get('name')}\0".encode() + _encode(arguments))
    return hasher.digest()


_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder(order="sorted", enc_hook=str).encode


def chain_start(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Of a conversation with these tools, before its first message."""
    shown = _encode([dict(tool) for tool in tools]) if tools else b""
    return hashlib.blake2b(shown, digest_size=DIGEST_BYTES).digest()
