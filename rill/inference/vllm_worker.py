"""What rill changes inside vLLM's workers: which log-probabilities they report, and how they take new weights.

Runs in vLLM's processes and imports nothing of vLLM. The engine in this process sends these functions to its workers;
`vllm serve --worker-extension-cls rill.inference.vllm_worker.WorkerExtension` has them for vllm_server.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rill.errors import UnsupportedError
from rill.inference.parameters import Checkpoint


class WorkerExtension:
    """Mixed into vLLM's worker class; the methods are called by name through /collective_rpc."""

    def rill_prepare(self) -> None:
        report_before_truncation(self)

    def rill_load_weights(self, path: str) -> None:
        checkpoint = Checkpoint((Path(path),))
        self.reload_weights(weights_iterator=iter(checkpoint))  # type: ignore[attr-defined]
        tie_head(self)


def report_before_truncation(worker: Any) -> None:
    """Let the sampler report log-probabilities as they are after the temperature and before top-k, top-p and min-p.

    vLLM has no setting for that. Its two model runners have a sampler each: V2's (the default on a GPU) keeps the
    requests' parameters in `sampling_states`, V1's (the CPU's) has a `topk_topp_sampler`.
    """
    sampler = worker.model_runner.sampler
    if sampler is None:  # a stage of a pipeline that is not its last
        return
    if hasattr(sampler, "sampling_states"):
        _hook_v2(sampler)
    elif hasattr(sampler, "topk_topp_sampler"):
        _hook_v1(sampler)
    else:
        raise UnsupportedError(
            f"vLLM's {type(sampler).__name__} is not one that rill knows: it was tried with vLLM 0.26 and 0.32"
        )


def _hook_v2(sampler: Any) -> None:
    """`sample` gives the tokens and the logits that are reported; the temperature is applied on the way."""
    states = sampler.sampling_states
    scale, sample = states.apply_temperature, sampler.sample
    reported: list[Any] = []

    def apply_temperature(logits: Any, *args: Any, **kwargs: Any) -> None:
        scale(logits, *args, **kwargs)  # in place, as is what comes after it
        reported[:] = [logits.clone()]

    def sample_and_report(*args: Any, **kwargs: Any) -> Any:
        reported.clear()  # where no row needs processing, nothing is applied
        sampled, processed = sample(*args, **kwargs)
        return sampled, reported.pop() if reported else processed

    states.apply_temperature = apply_temperature
    sampler.sample = sample_and_report


def _hook_v1(sampler: Any) -> None:
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
    """After a reload: tie the output head to the embedding again where it is a module of its own, and pack it again,
    which the CPU's kernels need."""
    model = worker.model_runner.get_model()
    if not model.config.tie_word_embeddings:
        return
    head, embedding = model.lm_head, model.model.embed_tokens
    if head is not embedding:
        head = model.lm_head = head.tie_weights(embedding)
    head.quant_method.process_weights_after_loading(head)
