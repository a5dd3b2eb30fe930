"""Messages as tokens: what follows an answer is appended, and is what the model's own template would have written.

Every template found is played through scripted conversations (see templates.py for where they come from).
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from rill.data.chat import PromptEncoder
from rill.errors import DataError
from rill.types import Message, Prompt
from tests.data.templates import FORGETFUL, HERMES, OWN, closing_of, templates, tokenizer_for

TEMPLATES = templates()
CALL = {
    "id": "abcdefgh0",
    "type": "function",
    "function": {"name": "price", "arguments": {"item": "tea"}},
}
ITEM = {"type": "object", "properties": {"item": {"type": "string", "description": "its name"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "price", "description": "What an item costs.", "parameters": ITEM},
    }
]


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str, *calls: dict[str, object]) -> Message:
    return Message(role="assistant", content=text, tool_calls=calls)


def tool(text: str) -> Message:
    return Message(role="tool", content=text, name="price", tool_call_id="abcdefgh0")


CONVERSATIONS = {
    "chat": [user("one?"), assistant("First."), user("two?"), assistant("Second."), user("three?")],
    "system": [Message(role="system", content="Be brief."), user("a?"), assistant("A."), user("b?")],
    "thoughts": [user("one?"), assistant("<think>\nhm\n</think>\n\nFirst."), user("two?")],
    "tool": [user("What is tea?"), assistant("", CALL), tool("42 euro")],
    "tool, then chat": [
        user("What is tea?"), assistant("", CALL), tool("42 euro"), assistant("42."), user("Thanks, and milk?"),
    ],
    "many lines": [user("a\n\nb  \n"), assistant("\n\nx\n"), user("  <b>\n")],
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, _ in TEMPLATES])
def test_nothing_drifts(name: str) -> None:
    """Where a template keeps what it wrote, the tokens are its own rendering to the letter; where it rewrites earlier
    turns, what was sampled stays and what is appended is what the template writes there."""
    encoder = PromptEncoder(tokenizer_for(dict(TEMPLATES)[name]))
    num_played = 0
    for conversation in CONVERSATIONS.values():
        with contextlib.suppress(
            DataError
        ):  # a template may refuse a conversation, but not leave something out
            encoder.check_roles(conversation)
            num_played += play(encoder, conversation)
    assert num_played >= 2, "at least conversations of user and assistant"


def play(encoder: PromptEncoder, conversation: list[Message]) -> int:
    tools = TOOLS if any(m.role == "tool" for m in conversation) else []
    starts = [n for n, message in enumerate(conversation) if message.role == "assistant"]
    ids = encoder.encode_messages(conversation[: starts[0]], tools)
    for at, end in zip(starts, [*starts[1:], len(conversation)], strict=True):
        before, after = (
            encoder.render(conversation[:n], tools, add_generation_prompt=True) for n in (at, end)
        )
        whole = encoder.decode(ids, skip_special=False)
        answer, is_kept = answer_of(encoder, conversation[at], before, after, tools, conversation[:at])
        sampled = encoder.encode_text(answer, special=False)
        new = conversation[at + 1 : end]
        appended = encoder.encode_following(conversation[at], new, tools=tools, sampled_ids=sampled)
        ids = np.concatenate([ids, sampled, appended])
        text = encoder.decode(appended, skip_special=False)
        assert after.endswith(text), "what is appended is what the template writes"
        assert all(message.content.strip() in text for message in new), "and holds all that is new"
        if is_kept and whole == before:
            assert encoder.decode(ids, skip_special=False) == after
    return 1


def answer_of(
    encoder: PromptEncoder,
    message: Message,
    before: str,
    after: str,
    tools: list[dict[str, object]],
    history: list[Message],
) -> tuple[str, bool]:
    """What a model writes that was trained with this template, and whether the template keeps it in a history."""
    if not message.tool_calls:
        closing = closing_of(encoder)
        _, _, rest = after.rpartition(before)
        end = rest.find(message.content) + len(message.content)
        is_kept = after.startswith(before) and end >= len(message.content) and rest[end:].startswith(closing)
        return (rest[:end] if is_kept else message.content) + closing, is_kept
    alone = encoder.render([*history, message], tools, add_generation_prompt=False)
    if not alone.startswith(before):
        raise DataError("the chat template writes calls elsewhere than behind the prompt")
    return alone[len(before) :].rstrip(), after.startswith(alone)


def test_the_corpus_is_not_empty_where_it_is_installed() -> None:
    assert len(TEMPLATES) == len(OWN) or len(TEMPLATES) >= 40


class TestFollowing:
    def encoder(self, template: str = HERMES) -> PromptEncoder:
        return PromptEncoder(tokenizer_for(template))

    def following(self, encoder: PromptEncoder, said: str, **options: object) -> str:
        ids = encoder.encode_text(said, special=False)
        message = assistant(said.removesuffix("<|im_end|>"))
        appended = encoder.encode_following(message, [user("b")], sampled_ids=ids, **options)  # type: ignore[arg-type]
        return encoder.decode(appended, skip_special=False)

    def test_an_answer_that_closed_itself_is_not_closed_again(self) -> None:
        expected = "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
        assert self.following(self.encoder(), "a<|im_end|>") == expected

    def test_a_cut_off_answer_is_closed_first(self) -> None:
        said = self.following(self.encoder(), "a", is_cut_off=True)
        assert said.startswith("<|im_end|>\n<|im_start|>user")

    def test_thoughts_that_a_template_would_drop_stay_as_they_were_sampled(self) -> None:
        encoder = self.encoder(FORGETFUL)
        said = "<think>x</think>a<|im_end|>"
        assert self.following(encoder, said).startswith("\n<|im_start|>user")
        assert "think" not in encoder.render(
            [user("q"), assistant(said), user("b")], add_generation_prompt=True
        )

    def test_the_work_does_not_grow_with_the_history(self) -> None:
        encoder = self.encoder()
        rendered: list[int] = []
        render = encoder.render

        def counting(messages: list[Message], *args: object, **options: object) -> str:
            rendered.append(len(messages))
            return render(messages, *args, **options)  # type: ignore[arg-type]

        encoder.render = counting  # type: ignore[method-assign,assignment]
        self.following(encoder, "a<|im_end|>")
        assert max(rendered) <= 3

    def test_a_role_that_the_template_leaves_out_is_an_error(self) -> None:
        silent = "{% for m in messages %}{% if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
        with pytest.raises(DataError, match="says nothing of messages with the role 'tool'"):
            self.encoder(silent).check_roles([user("a"), tool("b")])


def test_templates_that_read_parts_are_given_parts() -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    )
    encoder = PromptEncoder(tokenizer_for(template))
    assert encoder.render([user("hello")], add_generation_prompt=True) == "<user>hello"


def test_without_a_template_messages_are_refused() -> None:
    tokenizer = tokenizer_for("x")
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        PromptEncoder(tokenizer).encode(Prompt(id="p", messages=(user("a"),)))
    with pytest.raises(DataError, match="neither messages nor text"):
        PromptEncoder(tokenizer).encode(Prompt(id="p"))


CONTENTS = ("42", ' a "quoted" <b>\\n</b> é\n', "</think> <tool_response>x", "")


@pytest.mark.parametrize("name", [name for name, _ in TEMPLATES])
def test_a_turn_that_is_put_between_known_text_is_what_the_template_writes(name: str) -> None:
    tokenizer = tokenizer_for(dict(TEMPLATES)[name])
    framed, rendered = PromptEncoder(tokenizer), PromptEncoder(tokenizer)
    rendered.__dict__["_is_framed"] = lambda content: False  # always renders
    said = assistant(
        "", {"id": "abc123456", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    )
    sampled = np.array([framed.tokenizer.eos_token_id], dtype=np.int32)
    for content in CONTENTS:
        for before, new in ((said, tool(content)), (assistant("x"), user(content))):
            outcomes = []
            for encoder in (framed, rendered):
                try:
                    ids = encoder.encode_following(before, [new], sampled_ids=sampled).tolist()
                except DataError as error:
                    ids = str(error)
                outcomes.append(ids)
            assert outcomes[0] == outcomes[1], (content, new.role)
