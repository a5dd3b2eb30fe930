"""Causal language models of many makes, trained as transformers computes them; what cannot be is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rill.errors import UnsupportedError
from rill.models.loading import ModelConfig, load_model
from tests.training.tiny import SHAPE, make_samples, trainer

SPECIAL = {"max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen3": {},
    "gemma": {},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4},
    "phi3": {},
    "olmo2": {},
    "granite": {"logits_scaling": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.5},
    "starcoder2": {},
    "smollm3": {},
    "glm4": {},
    "gpt_neox": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_those_of_transformers_and_a_step_can_be_taken(kind: str) -> None:
    shape = {**SHAPE, **SPECIAL, **KINDS[kind], "model_type": kind}
    plain = load_model(ModelConfig(shape=shape), dtype=torch.float32, attention="eager")
    t, samples = trainer(model={"shape": shape}, micro_batch_tokens=64), make_samples(4)
    for sample, found in zip(samples, t.logprobs(samples), strict=True):
        ids = torch.tensor(sample.trajectory.token_ids).long()
        with torch.no_grad():
            logprobs = plain(ids[None]).logits[0].log_softmax(-1)
        wanted = logprobs[:-1].gather(1, ids[1:, None])[:, 0]
        np.testing.assert_allclose(found[1:], wanted, atol=1e-4)
    assert t.update(samples)["grad_norm"] > 0


@pytest.mark.parametrize(
    ("kind", "values", "says"),
    [
        ("gpt2", {"n_embd": 32, "n_layer": 1, "n_head": 4}, "`layers`"),
        ("gpt_oss", {"num_local_experts": 4}, "s_aux"),
        ("gemma2", {"sliding_window": 8}, "soft-capped"),
    ],
)
def test_what_packed_attention_does_not_compute_is_refused(
    kind: str, values: dict[str, Any], says: str
) -> None:
    shape = {**SHAPE, **SPECIAL, **values, "model_type": kind}
    with pytest.raises(UnsupportedError, match=says):
        trainer(model={"shape": shape}).logprobs(make_samples(2))
