"""Causal language models of many makes, trained as transformers computes them; what cannot be packed is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rill.errors import UnsupportedError
from rill.models.loading import ModelConfig, load_model
from rill.training.module import PolicyModule, load_packed_lm
from rill.training.packing import PackSequence, build_pack
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
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "gemma2": {
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 0.3,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
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


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "gpt_oss"])
def test_gradients_of_capped_scores_and_sinks_are_those_of_transformers(kind: str) -> None:
    shape = {**SHAPE, **SPECIAL, **KINDS[kind], "model_type": kind}
    plain = load_model(ModelConfig(shape=shape), dtype=torch.float32, attention="eager")
    lm = load_packed_lm(ModelConfig(shape=shape), dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():  # away from symmetric starts: sinks and biases begin at zero
        for ours, theirs in zip(lm.parameters(), plain.parameters(), strict=True):
            ours.add_(torch.randn_like(ours) * 0.1)
            theirs.copy_(ours)
    module = PolicyModule(lm)
    sequences = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [20, 21, 22]]
    wanted = [np.array([False] + [True] * (len(ids) - 1)) for ids in sequences]
    pack = build_pack(
        [
            PackSequence(token_ids=np.array(ids, np.int32), wanted=w)
            for ids, w in zip(sequences, wanted, strict=True)
        ],
        device=torch.device("cpu"),
        use_flash=False,
        share_prefixes=False,
    )
    output = module(pack, 0.7)
    (output.logprobs_K.sum() + 0.5 * output.entropy_K.sum()).backward()
    for ids in sequences:
        logprobs = (plain(torch.tensor([ids])).logits[0, :-1] / 0.7).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum()
        (logprobs.gather(1, torch.tensor(ids[1:])[:, None]).sum() + 0.5 * entropy).backward()
    for (name, ours), theirs in zip(lm.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None, name
        assert theirs.grad is not None, name
        torch.testing.assert_close(
            ours.grad, theirs.grad, atol=2e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_an_architecture_with_attention_of_its_own_is_refused() -> None:
    shape = {"model_type": "bloom", "vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    with pytest.raises(UnsupportedError, match="attention interface"):
        trainer(model={"shape": shape})
