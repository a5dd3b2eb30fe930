"""A real model folder whose greedy answer is known: its output depends on the position alone.

gpt2 has learned positions, so a one-hot position embedding and an output head that reads it write any text; the blocks
in between add nothing. Everything else is a model like any other: files, tokenizer, engine, sampler.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config

from rill.models.tokenizer import build_char_tokenizer

WIDTH = 256
CONFIDENCE = 0.75
"""A logit of 12 where the others have 0: about 0.999 at temperature 1."""


def write_scripted_model(folder: Path, answer: str, num_prompt_tokens: int) -> Path:
    """A model that says `answer`, then ends, when its prompt has that many tokens (temperature 0)."""
    tokenizer = build_char_tokenizer()
    assert num_prompt_tokens + len(answer) < WIDTH
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=2048, n_embd=WIDTH, n_layer=1, n_head=4, n_inner=16,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.zero_()
            if name.endswith("ln_f.weight"):
                parameter.fill_(1.0)
        model.transformer.wpe.weight[:WIDTH] = torch.eye(WIDTH)
        token_ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        for offset, token_id in enumerate(token_ids):
            model.lm_head.weight[token_id, num_prompt_tokens - 1 + offset] = CONFIDENCE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
