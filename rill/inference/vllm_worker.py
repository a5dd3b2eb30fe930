"""What rill changes inside vLLM's workers: which log-probabilities they report, and how they take new weights.

Runs in vLLM's processes and imports nothing of vLLM. The engine in this process sends these functions to its workers;
`vllm serve --worker-extension-cls rill.inference.vllm_worker.WorkerExtension` has them for vllm_server.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rill.inference.checkpoint import Checkpoint


class WorkerExtension:
    """Mixed into vLLM's worker class; the methods are called by name through /collective_rpc."""

    def rill_prepare(self) -> None:
        report_before_truncation(self)

    def rill_load_weights(self, path: str) -> None:
        checkpoint = Checkpoint((Path(path),))
        self.reload_weights(weights_iterator=iter(checkpoint))  # type: ignore[attr-defined]
        tie_head(self)


def report_before_truncation(worker: Any) -> None:
    """Let the sampler report log-probabilities as they are after the temperature and before top-k, top-p and min-p."""
    sampler = worker.model_runner.sampler
    scale, truncate = sampler.apply_temperature, sampler.topk_topp_sampler.forward
    reported: list[Any] = []

    def apply_temperature(logits: Any, temperature: Any, all_random: bool) -> Any:
        logits = scale(logits, temperature, all_random)
        reported[:] = [sampler.compute_logprobs(logits)]
        return logits

    def forward(*args: Any, **kwargs: Any) -> Any:
        sampled, _ = truncate(*args, **kwargs)
        return sampled, reported.pop()

    sampler.apply_temperature = apply_temperature
    sampler.topk_topp_sampler.forward = forward


def tie_head(worker: Any) -> None:
    """Tie the output head to the embedding again, and pack it again: a reload leaves it as it was."""
    model = worker.model_runner.get_model()
    if not model.config.tie_word_embeddings:
        return
    head = model.lm_head.tie_weights(model.model.embed_tokens)
    head.quant_method.process_weights_after_loading(head)
    model.lm_head = head
