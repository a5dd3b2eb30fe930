"""rill's requests and answers in vLLM's words. The module object `vllm` is handed in by vllm.py, which imports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rill.inference.base import Completion, Delta, Request
from rill.inference.requests import sampling_words
from rill.types import PolicyVersion, StopReason


class VllmWords:
    def __init__(self, vllm: Any) -> None:
        self._vllm = vllm

    def prompt(self, request: Request) -> Any:
        prompt = self._vllm.TokensPrompt(prompt_token_ids=request.token_ids.tolist())
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        return prompt

    def sampling(self, request: Request, num_kept: int = 0) -> Any:
        """`num_kept`: tokens that earlier attempts made, and that are part of the prompt now."""
        s = request.sampling
        # A generator starts anew with every attempt: the same seed would repeat the draws of the first.
        seed = s.seed if s.seed is None or not num_kept else hash((s.seed, num_kept))
        return self._vllm.SamplingParams(
            max_tokens=s.max_new_tokens,
            min_tokens=s.min_new_tokens,
            top_k=s.top_k,
            **sampling_words(s),
            logit_bias=dict(s.logit_bias) or None,
            seed=None if seed is None else seed % 2**63,
            logprobs=0,
            detokenize=bool(s.stop),
            output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
        )

    def scoring(self) -> Any:
        """Log-probabilities of the prompt; vLLM must sample one token too."""
        return self._vllm.SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )

    def adapter(self, name: str, number: int, folder: str | Path) -> Any:
        return self._vllm.lora.request.LoRARequest(name, number, str(folder))


def delta_of(request: Request, output: Any, version: PolicyVersion) -> Delta:
    (sample,) = output.outputs
    ids = list(sample.token_ids)
    logprobs = [entry[token].logprob for token, entry in zip(ids, sample.logprobs or [], strict=True)]
    return Delta(
        request_id=request.id,
        token_ids=np.asarray(ids, np.int32),
        logprobs=np.asarray(logprobs, np.float32),
        versions=np.full(len(ids), version, np.int32),
        stop_reason=_stop_reason(sample) if output.finished else None,
    )


def stop_text_of(output: Any) -> str | None:
    reason = output.outputs[0].stop_reason
    return reason if isinstance(reason, str) else None


def scores_of(request: Request, prompt_logprobs: Any) -> Completion:
    """The prompt's own log-probabilities, in a completion that generated nothing."""
    scores = np.zeros(len(request.token_ids), np.float32)
    for index, entry in enumerate(prompt_logprobs or []):
        if entry is not None:
            scores[index] = entry[int(request.token_ids[index])].logprob
    return Completion(
        request_id=request.id,
        token_ids=request.token_ids,
        logprobs=scores,
        versions=np.zeros(len(scores), np.int32),
        stop_reason=StopReason.LENGTH,
    )


def _stop_reason(sample: Any) -> StopReason:
    if sample.finish_reason == "length":
        return StopReason.LENGTH
    if sample.finish_reason == "abort":
        return StopReason.ABORTED
    return StopReason.EOS if sample.stop_reason is None else StopReason.STOP
