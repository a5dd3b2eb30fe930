"""Every architecture gives transformers' own answers, through the modules and through the fused decoder."""

from __future__ import annotations

import numpy as np
import pytest

from tests.inference.native_models import (
    SHAPES,
    check_greedy,
    forward_logprobs,
    greedy_tokens,
    make_engine,
    prompts,
    reference,
    request,
)


@pytest.mark.parametrize("fast_path", [True, False], ids=["fused", "modules"])
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_greedy_tokens_and_logprobs_are_those_of_transformers(
    name: str, fast_path: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_greedy(name, monkeypatch, fast_path=fast_path)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_scores_are_those_of_a_plain_forward_pass(name: str) -> None:
    model = reference(name)
    engine = make_engine(name)
    try:
        inputs = prompts((7, 90, 2, 1))  # 90 does not fit one step of 32 tokens
        for temperature in (1.0, 0.7):
            for tokens, scores in zip(inputs, engine.score(inputs, temperature, timeout_s=60)):
                np.testing.assert_allclose(scores, forward_logprobs(model, tokens, temperature), atol=1e-4)
        assert engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks
    finally:
        engine.close()


def test_a_shared_module_is_used_in_place_and_keeps_its_own_attention() -> None:
    from rill.inference.native.engine import NativeEngine
    from rill.models.loading import ModelConfig

    model = reference("qwen2")
    pointers = {n: p.data_ptr() for n, p in model.named_parameters()}
    config = NativeEngine.Config(model=ModelConfig(shape=SHAPES["qwen2"]), num_kv_blocks=32, max_num_seqs=4)
    engine = NativeEngine(config, model=model)
    try:
        (prompt,) = prompts((9,))
        assert engine.generate([request(0, prompt)])[0].token_ids.tolist() == greedy_tokens(model, prompt, 12)
        assert {n: p.data_ptr() for n, p in model.named_parameters()} == pointers
        assert model.config._attn_implementation == "eager"
        for parameter in model.parameters():
            parameter.data.mul_(1.3)
        engine.update_weights([], 1, partial=True)
        assert engine.generate([request(1, prompt)])[0].token_ids.tolist() == greedy_tokens(model, prompt, 12)
    finally:
        engine.close()
