"""What can be seen to go wrong before anything is started: files, models, lengths, and one episode on real rows.

    preflight(config)      notes to be shown; raises a UserError where the run could not succeed

Called by `rill train` before a run has a folder, and by `rill config check`. Nothing here needs a GPU or a cluster. The
episode is a real one (set-up, environment, reward, deadlines) in which the row's own answer stands for the policy's,
so that a mistake in a reward is told with the user's file and line now, and not after a warm-up.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from rill.config import PartConfig
from rill.data.base import Dataset, Split, open_dataset
from rill.data.chat import PromptEncoder
from rill.data.pairs import encode_pair
from rill.data.sft import SFTEncoder
from rill.envs.base import open_environment
from rill.envs.episode import run_episode
from rill.errors import ConfigError, DataError, MissingExtraError, ModelError, PlanError, UserError
from rill.inference.base import Completion
from rill.inference.native.draft_model import check_words
from rill.inference.native.runners import context_limit
from rill.models.card import TrainingCard
from rill.models.decode.shards import check_divides
from rill.models.loading import ModelConfig, check_vocabulary, load_model_config, load_tokenizer, model_folder
from rill.models.pictures import load_pictures
from rill.runtime.device.device import local_devices, number
from rill.runtime.device.placement import resolve
from rill.training.engine_config import EngineConfig
from rill.types import PICTURE, Episode, Message, Picture, Prompt, SamplingParams, StopReason, TokenIds
from rill.workflows.config import OnlineConfig, RecipeConfig
from rill.workflows.evaluation import read_prompts
from rill.workflows.rl_config import RLConfig
from rill.workflows.supervised import SupervisedConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_ROWS = 64
"""Encoded: the first of a set, and as many of the longest."""
NUM_READ = 10_000
"""Read to find the longest: all of a set, or so many spread over a larger one."""
READ_S = 2.0
"""For that: some rows are made up as they are read."""
NUM_EPISODES = 3
"""Tried; one that succeeds is enough."""
TRY_S = 60.0
"""For one of them."""


def preflight(config: RecipeConfig) -> list[str]:
    """Notes on what may go wrong; what must go wrong is an error."""
    config.guards()  # that guard_actions names those there are
    if isinstance(config, OnlineConfig) and config.cluster.type == "local":
        _seats(config)
        if (
            isinstance(config, RLConfig)
            and config.rollout.engine.type == "vllm"
            and find_spec("vllm") is None
        ):
            raise MissingExtraError("rollout.engine.type = 'vllm' needs vLLM: pip install 'rill[vllm]'")
    if isinstance(config, RLConfig):
        return _rl(config)
    if isinstance(config, SupervisedConfig):
        rows = _rows(config.data)
        tokenizer, notes = _tokenizer(config.model, is_local=config.cluster.type == "local")
        if tokenizer is not None:
            _try_examples(rows, _encoder(config.model, tokenizer), config.trainer, config.workflow)
        return notes
    return []


def _rl(config: RLConfig) -> list[str]:
    prompts = _rows(config.data)
    evals = [(chosen.env, read_prompts(chosen)) for chosen in config.eval.all_sets(config.data).values()]
    tokenizer, notes = _tokenizer(config.model, is_local=config.cluster.type == "local")
    if tokenizer is None:
        return notes
    if (num_ranks := config.rollout.engine.model_dump().get("tensor_parallel_size", 1)) > 1:
        check_divides(load_model_config(config.model), num_ranks)
    notes += _drafts(config, tokenizer)
    encoder = _encoder(config.model, tokenizer)
    notes += _lengths(config, config.rollout.env, prompts, encoder)
    notes += _writable(prompts, tokenizer)
    if config.sft.steps:
        shown = prompts if config.sft.data is None else _rows(config.sft.data)
        _try_examples(shown, encoder, config.trainer)
    sampling = config.rollout.sampling.params()
    notes += _try_episodes(config.rollout.env, prompts, encoder, sampling)
    for env, asked in evals:
        notes += _lengths(config, env or config.rollout.env, _first_and_longest(iter(asked)), encoder)
        if env is not None:
            notes += _try_episodes(env, asked, encoder, sampling)
    return list(dict.fromkeys(notes))


def training_card(config: RecipeConfig, run: str) -> TrainingCard | None:
    """How the recipe asks its model; None for one that writes no answers."""
    if not isinstance(config, RLConfig | SupervisedConfig) or config.workflow == "reward_model":
        return None
    first = next(_read(config.data))
    is_bare = not first.messages and first.text is not None
    card = TrainingCard(
        run=run,
        workflow=config.workflow,
        prompts="bare" if is_bare else "chat",
        base_model=config.model.path or "",
        example=first.text or (first.messages[-1].content if first.messages else ""),
    )
    if not isinstance(config, RLConfig):
        return card
    return replace(
        card,
        prompts=card.prompts if config.rollout.env.type == "single_turn" else "chat",
        template_arguments=config.rollout.env.model_dump().get("template_arguments", {}),
        max_new_tokens=config.rollout.sampling.max_new_tokens,
    )


# --- devices -----------------------------------------------------------------------------------------------


def _seats(config: OnlineConfig) -> None:
    """The placement names devices that this machine has."""
    devices = number(local_devices(config.cluster.devices or "auto"))
    for group, placement in config.placement.model_dump().items():
        try:
            if placement is not None:
                resolve(placement, devices)
        except PlanError as error:
            raise ConfigError(f"placement.{group}: {error} (cluster.devices sets how many)") from error


# --- files -------------------------------------------------------------------------------------------------


def _rows(data: PartConfig) -> list[Prompt]:
    return _first_and_longest(_read(data))


def _read(data: PartConfig) -> Iterator[Prompt]:
    """The first rows; then the others, or some all over the set, as long as that is quick."""
    dataset = open_dataset(data, Split.TRAIN)
    if not isinstance(dataset, Dataset):
        yield from islice(iter(dataset), NUM_ROWS)
        return
    until, count = time.monotonic() + READ_S, len(dataset)
    for place in (*range(min(NUM_ROWS, count)), *range(NUM_ROWS, count, -(-count // NUM_READ))):
        if place >= NUM_ROWS and time.monotonic() > until:
            return
        yield dataset[place]


def _first_and_longest(rows: Iterator[Prompt]) -> list[Prompt]:
    first = list(islice(rows, NUM_ROWS))
    return [*first, *heapq.nlargest(NUM_ROWS, rows, key=_num_characters)]


def _num_characters(prompt: Prompt) -> int:
    texts = [prompt.text, prompt.answer, *(message.content for message in prompt.messages)]
    texts += [each.content if isinstance(each, Message) else each for each in prompt.metadata.values()]
    return sum(len(text) for text in texts if isinstance(text, str))


def _encoder(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> PromptEncoder:
    encoder = PromptEncoder(tokenizer)
    encoder.pictures = load_pictures(model)
    return encoder


def _tokenizer(model: ModelConfig, *, is_local: bool) -> tuple[PreTrainedTokenizerBase | None, list[str]]:
    """The model is there, and its tokenizer fits it. On a cluster it may lie where only the workers see it."""
    try:
        tokenizer = load_tokenizer(model)
        check_vocabulary(tokenizer, load_model_config(model).get_text_config())
        if model.path:
            model_folder(model.path)
    except ModelError as error:
        if is_local:
            raise
        return None, [f"the model is not seen from here, so nothing was tried ahead: {error}"]
    return tokenizer, _foreign(model, tokenizer)


def _drafts(config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The engine's draft model is there too, and reads the same tokens."""
    given = config.rollout.engine.model_dump().get("draft_model")
    if not given or not (given["path"] or given["tokenizer"]):
        return []
    drafting, notes = _tokenizer(ModelConfig(**given), is_local=config.cluster.type == "local")
    if drafting is not None:
        check_words(tokenizer, drafting)
    return notes


def _foreign(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A model reads and writes with the tokenizer in its folder; another of the same size gives no error, ever."""
    if not (model.path and model.tokenizer):
        return []
    try:
        own = load_tokenizer(model.model_copy(update={"tokenizer": None})).get_vocab()
    except ModelError:
        return []
    given = tokenizer.get_vocab()
    num_other = sum(own.get(token) != number for token, number in given.items())
    if not num_other:
        return []
    return [
        f"model.tokenizer is not the tokenizer of {model.path}: {num_other} of its {len(given)} tokens have other ids "
        "there, so the model will read and write other text than it learnt"
    ]


# --- lengths and letters -----------------------------------------------------------------------------------


def _lengths(
    config: RLConfig, env: PartConfig, prompts: Sequence[Prompt], encoder: PromptEncoder
) -> list[str]:
    """Prompt and answer fit the context; where only the answers to the longest do not, that is a note."""
    asked = [prompt for prompt in prompts if prompt.messages or prompt.text]
    if not asked or env.type != "single_turn":
        return []  # what other environments ask is theirs to say
    lengths = [len(encoder.encode(prompt)) for prompt in asked]
    engine = config.rollout.engine.model_dump()
    context = context_limit(load_model_config(config.model), engine.get("max_context"))
    wanted, shortest, longest = config.rollout.sampling.max_new_tokens, min(lengths), max(lengths)
    where = asked[lengths.index(longest)].id
    if longest >= context:
        num_such = sum(length >= context for length in lengths)
        said = (
            f"prompt {where} has {longest} tokens and the model's context is {context}: it cannot be answered, like "
            f"{num_such} of the {len(asked)} looked at, the longest among them"
        )
        if config.trainer.on_too_long == "error" or num_such == len(asked):
            raise DataError(f"{said}: leave such rows out, or let them fail with trainer.on_too_long=skip")
        return [said]
    if shortest + wanted > context:
        raise ConfigError(
            f"rollout.sampling.max_new_tokens = {wanted} with prompts of {shortest} tokens and more does not fit the "
            f"model's context of {context} tokens: lower it to {context - longest}"
        )
    if longest + wanted > context:
        return [
            f"prompt {where} has {longest} tokens: with max_new_tokens = {wanted} its answers are cut at the model's "
            f"context of {context}"
        ]
    room = config.trainer.micro_batch_tokens
    if config.trainer.on_too_long == "error" and longest + wanted > room:
        return [
            f"an answer of {wanted} tokens to a prompt of {longest} would not fit trainer.micro_batch_tokens = {room} "
            "and end the run: raise it, or set trainer.on_too_long=skip"
        ]
    return []


def _try_examples(
    rows: Sequence[Prompt], encoder: PromptEncoder, trainer: EngineConfig, workflow: str = "sft"
) -> None:
    """What is imitated has a written answer, and fits one forward pass."""
    limit = trainer.micro_batch_tokens if trainer.on_too_long == "error" else None
    examples = SFTEncoder(encoder, max_tokens=limit)
    for row in rows:
        if workflow == "sft":
            examples.encode(row)
        else:
            encode_pair(examples, row)


def _writable(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A tokenizer with an unknown token loses what it has no token for. An answer with such letters is never given."""
    unknown = tokenizer.unk_token_id
    if unknown is None:
        return []
    for prompt in prompts:
        if isinstance(prompt.answer, str) and unknown in tokenizer.encode(prompt.answer):
            raise DataError(
                f"{prompt.id}: the tokenizer cannot write its answer {prompt.answer!r:.80}: use a model whose own can"
            )
        asked = prompt.text or "".join(m.content.replace(PICTURE, "") for m in prompt.messages)
        if unknown in tokenizer.encode(asked):
            return [f"{prompt.id}: the tokenizer does not know all characters of {asked!r:.80}"]
    return []


# --- one episode -------------------------------------------------------------------------------------------


class _Answering:
    """A policy that says the same whatever it is asked."""

    def __init__(self, token_ids: TokenIds) -> None:
        self._token_ids = token_ids

    async def generate(
        self,
        token_ids: TokenIds,
        sampling: SamplingParams,
        *,
        name: str,
        model: str | None = None,
        pictures: tuple[Picture, ...] = (),
    ) -> Completion:
        await asyncio.sleep(0.001)  # who asks for ever still comes to a deadline
        count = len(self._token_ids)
        return Completion(
            request_id=name,
            token_ids=self._token_ids,
            logprobs=np.zeros(count, np.float32),
            versions=np.zeros(count, np.int32),
            stop_reason=StopReason.EOS,
        )


def _try_episodes(
    config: PartConfig, prompts: Sequence[Prompt], encoder: PromptEncoder, sampling: SamplingParams
) -> list[str]:
    """One of them has to come to a reward. One that takes long is a note: a sandbox may have to be built."""
    tokenizer = encoder.tokenizer
    environment = open_environment(config, tokenizer, encoder.pictures)

    async def tried() -> list[Episode]:
        """None where one has come to a reward for what the policy said."""
        episodes: list[Episode] = []
        for prompt in prompts[:NUM_EPISODES]:
            said = str(prompt.metadata.get("solution") or prompt.answer or "0")
            ids = np.asarray([*tokenizer.encode(said, add_special_tokens=False), *_end(tokenizer)], np.int32)
            work = run_episode(
                environment,
                prompt,
                _Answering(ids),
                episode_id=f"preflight/{prompt.id}",
                group_id="preflight",
                sampling=sampling,
            )
            episode = await asyncio.wait_for(work, TRY_S)
            if episode.failure is None and episode.metrics["turns"]:
                return []
            episodes.append(episode)
        return episodes

    try:
        episodes = asyncio.run(tried())  # on one event loop, as in a run
    except TimeoutError:
        return [f"an episode of {config.type!r} was tried, and not finished after {TRY_S:g} s"]
    finally:
        environment.close()
    if not episodes:
        return []
    where, error = f"tried on {len(episodes)} row(s) with their own answers", episodes[-1].error
    if error is not None:
        raise UserError(f"{where}, every episode failed: {error}")
    raise UserError(
        f"{where}, the environment {config.type!r} never asked the policy for anything: its run() has to await "
        "generate, say or act of an agent"
    )


def _end(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
