"""The built-in character tokenizer: one token per printable ASCII character, with a chat template.

For small models trained from nothing: the demo, the tests and the generated tasks need no download.
"""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL_TOKENS = (PAD, BOS, EOS, UNKNOWN, "<system>", "<user>", "<assistant>", "<tool>")
CHARACTERS = "\n" + "".join(sorted(set(string.printable) - set(string.whitespace))) + " "

PICTURE_TOKENS = ("<picture>", "<image>", "</picture>")
"""Behind all others, for vision-language models: the middle one is the placeholder."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<picture><image></picture>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def build_char_tokenizer(*, has_pictures: bool = False) -> PreTrainedTokenizerBase:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pictures = PICTURE_TOKENS if has_pictures else ()
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS, *pictures])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=["<system>", "<user>", "<assistant>", "<tool>", *pictures],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
