"""SFT examples carry loss on the assistant's tokens only, exactly."""

from __future__ import annotations

import pytest

from rill.data.chat import PromptEncoder
from rill.data.sft import SFTEncoder
from rill.errors import DataError
from rill.models.tokenizer import build_char_tokenizer
from rill.types import Message, Prompt


def encoder(template: str | None = None) -> PromptEncoder:
    tokenizer = build_char_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    return PromptEncoder(tokenizer)


def talk(*turns: tuple[str, str]) -> tuple[Message, ...]:
    return tuple(Message(role=role, content=content) for role, content in turns)


def trained_text(sft: SFTEncoder, prompt: Prompt) -> str:
    example = sft.encode(prompt)
    return sft.encoder.decode(example.token_ids[example.loss_mask], skip_special=False)


def test_plain_text_carries_loss_on_the_completion_and_the_end_token() -> None:
    sft = SFTEncoder(encoder())
    prompt = Prompt(id="p", text="2+2=", answer="4", metadata={"solution": "(2+2=4)4"})
    assert trained_text(sft, prompt) == "(2+2=4)4<eos>"
    example = sft.encode(prompt)
    assert example.token_ids[:4].tolist() == sft.encoder.encode(prompt).tolist()


def test_every_assistant_turn_carries_loss_and_nothing_else_does() -> None:
    sft = SFTEncoder(encoder())
    prompt = Prompt(
        id="p",
        messages=talk(
            ("system", "be brief"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")
        ),
    )
    assert trained_text(sft, prompt) == "b<eos>d<eos>"


def test_a_question_gets_its_solution_as_the_answer() -> None:
    sft = SFTEncoder(encoder())
    assert trained_text(sft, Prompt(id="p", messages=talk(("user", "1+1?")), answer="2")) == "2<eos>"


def test_what_precedes_the_answer_is_what_the_engine_would_be_given() -> None:
    sft = SFTEncoder(encoder())
    prompt = Prompt(id="p", messages=talk(("user", "1+1?")), answer="2")
    example = sft.encode(prompt)
    asked = sft.encoder.encode(prompt)
    assert example.token_ids[: len(asked)].tolist() == asked.tolist()
    assert not example.loss_mask[: len(asked)].any() and example.loss_mask[len(asked) :].all()


def test_the_line_feed_a_template_adds_after_the_end_token_is_not_trained_on() -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    sft = SFTEncoder(encoder(template))
    assert trained_text(sft, Prompt(id="p", messages=talk(("user", "a"), ("assistant", "b")))) == "b<eos>"


def test_a_template_that_rewrites_earlier_turns_is_a_clear_error() -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}<eos>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    sft = SFTEncoder(encoder(template))
    conversation = talk(("user", "a"), ("assistant", "think b"), ("user", "c"), ("assistant", "d"))
    with pytest.raises(DataError, match="rewrites or re-tokenizes"):
        sft.encode(Prompt(id="p", messages=conversation))


def test_a_prompt_without_solution_or_a_row_over_the_limit_is_refused() -> None:
    with pytest.raises(DataError, match="no written solution"):
        SFTEncoder(encoder()).encode(Prompt(id="p", text="x"))
    with pytest.raises(DataError, match="the limit is 3"):
        SFTEncoder(encoder(), max_tokens=3).encode(Prompt(id="p", text="x", answer="123"))
