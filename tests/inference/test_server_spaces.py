"""Tokenizers made by SentencePiece (Llama 2, Mistral): a token that begins a word carries the space before it, and a
decoder drops the one that a text begins with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rill.inference.server import BackgroundServer, ServerConfig, create_app
from tests.inference.fake_engine import EOS, FakeEngine

PIECES = ["<unk>", "<s>", "</s>", "▁Hello", "▁world", "!", "▁", "▁again", "<0xC3>", "<0xA9>", "ly"]
HELLO = 3
ANSWER = [4, 5, 7, 10, 8, 9, 6, EOS]


def tokenizer() -> PreTrainedTokenizerFast:
    """Decodes as Llama 2's."""
    made = Tokenizer(models.Unigram([(piece, -1.0) for piece in PIECES], unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=template,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    engine: Any = FakeEngine()
    engine.tokenizer, engine._script = tokenizer(), lambda request: ANSWER
    config = ServerConfig(port=0, model_name="tiny", stream_interval_s=0.0)
    with BackgroundServer(create_app(engine, engine.tokenizer, config), config) as server:
        with httpx.Client(base_url=server.url, timeout=20) as client:
            yield client
    engine.close()


def text_of(client: httpx.Client, path: str, body: dict[str, Any], *, is_streamed: bool) -> str:
    response = client.post(path, json=body | {"stream": is_streamed})
    lines = response.text.split("\n\n")[:-2] if is_streamed else [response.text]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    parts = [choice.get("text", choice.get("delta", choice.get("message"))) for choice in choices]
    return "".join(part if isinstance(part, str) else part.get("content", "") for part in parts)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
def test_a_completion_is_written_as_it_stands_behind_its_prompt(
    client: httpx.Client, is_streamed: bool
) -> None:
    for prompt in ([HELLO], [1, HELLO, 1]):
        body = {"prompt": prompt}
        assert text_of(client, "/v1/completions", body, is_streamed=is_streamed) == " world! againlyé "
    echoed = client.post("/v1/completions", json={"prompt": [HELLO], "echo": True}).json()["choices"][0]
    assert echoed["text"] == "Hello world! againlyé "


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
def test_an_answer_begins_without_a_space_unless_it_goes_on_with_a_message(
    client: httpx.Client, is_streamed: bool
) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    path, ask = "/v1/chat/completions", {"messages": messages}
    assert text_of(client, path, ask, is_streamed=is_streamed) == "world! againlyé "
    more = {"add_generation_prompt": False, "continue_final_message": True}
    assert text_of(client, path, ask | more, is_streamed=is_streamed) == " world! againlyé "


def test_tokens_by_themselves_keep_their_space(client: httpx.Client) -> None:
    choice = client.post("/v1/completions", json={"prompt": [HELLO], "logprobs": 0}).json()["choices"][0]
    told = choice["logprobs"]
    assert told["tokens"][:4] == [" world", "!", " again", "ly"] and told["tokens"][6] == " "
    assert told["text_offset"][:4] == [0, 6, 7, 13]
