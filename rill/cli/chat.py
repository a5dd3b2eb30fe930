"""`rill chat`: talk to a model in the terminal, asked as it was trained. One line in, one answer out, token by token.

a chat model    the conversation goes on from line to line; /new begins another
a bare model    every line is a prompt by itself, as it was in training (rill.json)
"""

from __future__ import annotations

import itertools
import sys
from queue import Queue
from typing import TYPE_CHECKING, Annotated

import typer

from rill.cli.arguments import Model, model_path
from rill.cli.console import say, waiting
from rill.errors import UserError
from rill.types import Message, Prompt, SamplingParams, TokenIds

if TYPE_CHECKING:
    from rill.data.chat import PromptEncoder
    from rill.inference.base import Completion, Engine

NEW = "/new"
TIMEOUT_S = 600.0
DEFAULT_TOKENS = 1024

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def chat(
    model: Model,
    settings: Annotated[list[str] | None, typer.Argument(help="engine.* as KEY=VALUE.")] = None,
    system: Annotated[str, typer.Option("--system", help="A system message.")] = "",
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0: greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=0, help="0: as in training, else 1024.")] = 0,
    engine: Annotated[str, typer.Option(help="native or vllm.")] = "native",
) -> None:
    """Chat with a model. /new begins another conversation; Ctrl-D ends.

    \b
    Examples:
      rill chat demo
      rill chat Qwen/Qwen2.5-0.5B-Instruct --temperature 0.7
      echo "176+413=" | rill chat demo
    """
    model_path(model)  # a wrong name is answered at once
    with waiting("loading"):
        from rill.cli.serving import build_config, build_engine, card_of, model_of, template_of
        from rill.data.chat import PromptEncoder
        from rill.models.loading import load_tokenizer

        config = build_config(model, settings or [], engine=engine)
        card = card_of(config)
        tokenizer = load_tokenizer(model_of(config))
        tokenizer.chat_template = template_of(config, tokenizer, card) or tokenizer.chat_template
        if not tokenizer.chat_template:
            raise UserError(
                f"{model} has no chat template: rill serve answers /v1/completions for such models"
            )
        encoder = PromptEncoder(tokenizer)
        running = build_engine(config)
    limit = max_tokens or (card.max_new_tokens if card else 0) or DEFAULT_TOKENS
    sampling = SamplingParams(temperature=temperature, max_new_tokens=min(limit, running.max_context - 1))
    try:
        Conversation(
            running, encoder, sampling, system=system, is_bare=card is not None and card.prompts == "bare"
        ).run()
    finally:
        running.close()


class Conversation:
    def __init__(
        self, engine: Engine, encoder: PromptEncoder, sampling: SamplingParams, *, system: str, is_bare: bool
    ) -> None:
        self._engine = engine
        self._encoder = encoder
        self._sampling = sampling
        self._is_bare = is_bare
        self._opening = [Message(role="system", content=system)] if system and not is_bare else []
        self._messages = list(self._opening)

    def run(self) -> None:
        """Until the input ends."""
        for number in itertools.count():
            if sys.stdin.isatty():
                typer.echo("> ", nl=False)
            line = sys.stdin.readline()
            if not line:
                return
            if line.strip() == NEW:
                self._messages = list(self._opening)
            elif line.strip():
                self._answer(line.rstrip("\n"), f"chat/{number}")

    def _answer(self, line: str, name: str) -> None:
        if self._is_bare:
            ids = self._encoder.encode(Prompt(id=name, text=line))
        else:
            self._messages.append(Message(role="user", content=line))
            ids = self._encoder.encode_messages(self._messages)
        if len(ids) >= self._engine.max_context:
            say(
                f"that is more than the model's context of {self._engine.max_context} tokens: {NEW} begins anew"
            )
            return
        said = self._stream(ids, name)
        if not self._is_bare:
            self._messages.append(Message(role="assistant", content=said))

    def _stream(self, ids: TokenIds, name: str) -> str:
        """Write the answer as it comes; Ctrl-C ends it, not the chat."""
        from rill.inference.base import Delta, Request

        deltas: Queue[Delta | None] = Queue()
        request = Request(id=name, token_ids=ids, sampling=self._sampling)
        [future] = self._engine.submit([request], on_delta=deltas.put)
        future.add_done_callback(lambda _: deltas.put(None))
        tokens: list[int] = []
        written = ""
        try:
            while (delta := deltas.get(timeout=TIMEOUT_S)) is not None:
                tokens += delta.token_ids.tolist()
                text = self._text(tokens)
                if not text.endswith("\ufffd"):  # half a character
                    typer.echo(text[len(written) :], nl=False)
                    written = text
        except KeyboardInterrupt:
            self._engine.abort([name])
        done: Completion = future.result(timeout=TIMEOUT_S)
        text = self._text(done.token_ids.tolist())
        typer.echo(text[len(written) :])
        return text

    def _text(self, tokens: list[int]) -> str:
        import numpy as np

        return self._encoder.decode(np.asarray(tokens, np.int32))
