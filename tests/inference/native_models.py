"""Tiny random models of every supported architecture, and transformers' own answers for them."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from rill.errors import EngineError
from rill.inference.base import Completion, Request
from rill.inference.native import core
from rill.inference.native.engine import NativeEngine
from rill.inference.native.model_runner import CpuRunner
from rill.inference.native.sequence import Sequence
from rill.inference.native.speculation import Speculator
from rill.models.loading import ModelConfig, load_model
from rill.types import PolicyVersion, SamplingParams
from tests.inference.integrity import checked_every_step

VOCAB = 97
_LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,  # near-uniform logits would make every comparison of tokens a coin toss
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA | {"model_type": "llama"},
    "llama-tied": _LLAMA | {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": _LLAMA | {"model_type": "mistral", "head_dim": 8, "sliding_window": 8},
    "qwen2": _LLAMA | {"model_type": "qwen2", "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen2-window": _LLAMA
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": _LLAMA | {"model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": _LLAMA
    | {
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gemma": _LLAMA | {"model_type": "gemma", "head_dim": 8, "num_key_value_heads": 1},
    "gemma2": _LLAMA
    | {"model_type": "gemma2", "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "initializer_range": 0.4,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}


def make_engine(name: str = "llama", *, check_every_step: bool = True, **options: Any) -> NativeEngine:
    options = {"device": "cpu", "num_kv_blocks": 64, "max_num_seqs": 8, "max_batched_tokens": 32} | options
    engine = NativeEngine(NativeEngine.Config(model=ModelConfig(shape=SHAPES[name]), **options))
    return checked_every_step(engine) if check_every_step else engine


def reference(name: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    return load_model(ModelConfig(shape=SHAPES[name]), dtype=dtype, attention="eager")


def greedy_tokens(model: Any, prompt: np.ndarray[Any, Any], num_tokens: int) -> list[int]:
    out = model.generate(
        torch.tensor(prompt)[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(t) for t in out[0, len(prompt) :]]


@torch.no_grad()
def forward_logprobs(
    model: Any, tokens: np.ndarray[Any, Any], temperature: float = 1.0
) -> np.ndarray[Any, Any]:
    ids = torch.tensor(np.asarray(tokens, dtype=np.int64))
    logprobs = (model(ids[None]).logits[0].float() / temperature).log_softmax(-1)
    picked = logprobs[:-1].gather(1, ids[1:, None])[:, 0]
    return np.concatenate([[0.0], picked.numpy()])


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, size=length).astype(np.int32) for length in lengths]


def request(index: int | str, tokens: np.ndarray[Any, Any], **sampling: Any) -> Request:
    sampling = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True} | sampling
    return Request(id=str(index), token_ids=tokens, sampling=SamplingParams(**sampling))


class Oracle(Speculator):
    """Drafts what is known to come, with a wrong token here and there."""

    answers: ClassVar[dict[str, list[int]]] = {}
    """By request id."""
    rng: ClassVar[random.Random] = random.Random(0)

    @classmethod
    def install(cls, monkeypatch: pytest.MonkeyPatch, num_rows: int = 32) -> None:
        """In engines that are made from here on, where they speculate at all."""
        monkeypatch.setattr(core, "Speculator", cls)
        monkeypatch.setattr(CpuRunner, "num_verified_rows", num_rows)
        monkeypatch.setattr(cls, "answers", {})
        monkeypatch.setattr(cls, "rng", random.Random(0))

    @classmethod
    def tell(cls, completions: list[Completion]) -> None:
        cls.answers |= {c.request_id: c.token_ids.tolist() for c in completions}

    def _draft(self, seq: Sequence, most: int) -> list[int]:
        most = min(most, seq.max_tokens - seq.num_tokens - 1)
        known = self.answers.get(seq.id, [])[seq.num_generated :][: max(0, most)]
        return [t if self.rng.random() < 0.8 else max(0, t - 1) for t in known]


def check_greedy(name: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Tokens and log-probabilities are transformers' own, one by one and again from drafts that are partly true."""
    Oracle.install(monkeypatch)
    model = reference(name)
    engine = make_engine(name, max_num_seqs=32, num_speculative_tokens=7, **options)
    try:
        inputs = prompts((5, 16, 33, 40, 40, 1))
        requests = [request(i, p) for i, p in enumerate(inputs)]
        completions = engine.generate(requests, timeout_s=110)
        assert engine.stats().num_draft_tokens == 0
        for prompt, completion in zip(inputs, completions):
            assert completion.token_ids.tolist() == greedy_tokens(model, prompt, 12)
            whole = np.concatenate([prompt, completion.token_ids])
            expected = forward_logprobs(model, whole)[len(prompt) :]
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        Oracle.tell(completions)
        for plain, drafted in zip(completions, engine.generate(requests, timeout_s=110)):
            assert drafted.token_ids.tolist() == plain.token_ids.tolist()
            np.testing.assert_allclose(drafted.logprobs, plain.logprobs, atol=1e-4)
        assert engine.stats().num_draft_tokens > engine.stats().num_accepted_tokens > 6
    finally:
        engine.close()


def new_weights(scale: float) -> list[tuple[str, torch.Tensor]]:
    """The reference's, times `scale`."""
    return [(name, parameter.data * scale) for name, parameter in reference().named_parameters()]


def check_weights_that_are_not_numbers(engine: NativeEngine, temperature: float) -> None:
    """They fail the request, by name, and the next whole ones serve."""
    engine.update_weights(new_weights(float("nan")), PolicyVersion(1))
    prompt = request(1, prompts((8,))[0], temperature=temperature)
    with pytest.raises(EngineError, match="version 1 are not numbers"):
        engine.generate([prompt])
    engine.update_weights(new_weights(1.0), PolicyVersion(2))
    assert len(engine.generate([prompt])[0].token_ids)
