"""Chat templates of other people's models, found in installed packages, and a tokenizer that fits any of them.

TRL's wheel holds 41 original templates (`pip install --no-deps trl==1.16.0`); they are read where they lie and not
copied here, as each has its model's licence. Where TRL is absent, rill's own template and the two below are left.
"""

from __future__ import annotations

import importlib.util
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from rill.data.chat import MARK, PromptEncoder
from rill.models.tokenizer import CHAT_TEMPLATE
from rill.types import Message

HERMES = """\
{%- if tools %}<|im_start|>system
Call tools as <tool_call>{"name": …, "arguments": {…}}</tool_call>. Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

FORGETFUL = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == "assistant" and not loop.last %}{{ message.content.split("</think>")[-1] }}\
{% else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Drops what was thought in all but the last turn, as many do."""

OWN = [("char", CHAT_TEMPLATE), ("hermes", HERMES), ("forgetful", FORGETFUL)]


def templates() -> list[tuple[str, str]]:
    """Name and text; originals only, not the variants that TRL trains with."""
    found = list(OWN)
    spec = importlib.util.find_spec("trl")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        paths = sorted((Path(place) / "chat_templates").glob("*.jinja"))
        found += [(p.stem, p.read_text(encoding="utf-8")) for p in paths if not p.stem.endswith("_training")]
    return found


@lru_cache(maxsize=8)
def tokenizer_for(template: str) -> Any:
    """One token per byte, and one for everything that looks like a special token in the template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: n for n, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = sorted(set(re.findall(r"<[|｜/]?[A-Za-z_▁|｜0-9]+>|\[/?[A-Z_]{2,}\]", template)))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=[token for token in special if token not in ("<bos>", "<eos>")],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def closing_of(encoder: PromptEncoder) -> str:
    """What a model writes when it has answered: the first special token behind the answer. Empty: the template has
    none, and a model trained with it ends with its end-of-sequence token."""
    asked = [Message(role="user", content="?"), Message(role="assistant", content=MARK)]
    _, _, tail = encoder.render(asked, add_generation_prompt=False).partition(MARK)
    special = [token for token in encoder.tokenizer.all_special_tokens if tail.lstrip().startswith(token)]
    return max(special, key=len, default="")
