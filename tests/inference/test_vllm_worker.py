"""What the adapter changes in vLLM's workers, against objects shaped as 0.26's and the CPU build's are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rill.errors import EngineError, UnsupportedError, WeightSyncError
from rill.inference.vllm import VllmEngine, VllmWords
from rill.inference.vllm_worker import report_before_truncation, tie_head
from rill.models.loading import ModelConfig
from rill.types import PolicyVersion

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


class SamplerV2:
    """Logits are processed in place; what `sample` returns second is reported."""

    def __init__(self, temperature: float, top_k: int | None) -> None:
        self._temperature, self._top_k = temperature, top_k
        self.sampling_states = SimpleNamespace(apply_temperature=self._scale)

    def _scale(self, logits: torch.Tensor, idx_mapping: Any, idx_mapping_np: Any) -> None:
        logits /= self._temperature

    def sample(self, logits: torch.Tensor, *mappings: Any, return_logprobs: bool = False) -> Any:
        if self._temperature == 1.0 and self._top_k is None:
            return logits.argmax(-1), logits  # nothing to process
        logits = logits.clone()
        self.sampling_states.apply_temperature(logits, None, None)
        if self._top_k is not None:
            logits[:, self._top_k :] = float("-inf")
        return logits.argmax(-1), logits


class SamplerV1:
    def __init__(self, top_k: int) -> None:
        self.topk_topp_sampler = SimpleNamespace(forward=self._truncate)
        self._top_k = top_k

    def apply_temperature(self, logits: torch.Tensor, temperature: float, all_random: bool) -> torch.Tensor:
        return logits / temperature

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1)

    def _truncate(self, logits: torch.Tensor) -> Any:
        cut = logits.clone()
        cut[:, self._top_k :] = float("-inf")
        return cut.argmax(-1), cut.log_softmax(-1)


def worker_of(sampler: Any) -> Any:
    return SimpleNamespace(model_runner=SimpleNamespace(sampler=sampler))


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (0.5, 2), (1.0, 2)])
def test_the_v2_sampler_reports_what_it_had_before_truncation(temperature: float, top_k: int | None) -> None:
    sampler = SamplerV2(temperature, top_k)
    report_before_truncation(worker_of(sampler))
    for _ in range(2):
        sampled, reported = sampler.sample(LOGITS, None, return_logprobs=True)
        assert sampled.tolist() == [0]
        torch.testing.assert_close(reported, LOGITS / temperature)


def test_the_v1_sampler_reports_what_it_had_before_truncation() -> None:
    sampler = SamplerV1(top_k=1)
    report_before_truncation(worker_of(sampler))
    scaled = sampler.apply_temperature(LOGITS, 0.5, True)
    _, reported = sampler.topk_topp_sampler.forward(scaled)
    torch.testing.assert_close(reported, (LOGITS / 0.5).log_softmax(-1))


def test_a_sampler_of_an_unknown_kind_is_refused_in_words() -> None:
    with pytest.raises(UnsupportedError, match="SimpleNamespace is not one that rill knows"):
        report_before_truncation(worker_of(SimpleNamespace()))
    report_before_truncation(worker_of(None))  # a stage without a sampler


class Head:
    def __init__(self) -> None:
        self.weight, self.num_packed = torch.zeros(1), 0
        self.quant_method = SimpleNamespace(process_weights_after_loading=self._pack)

    def _pack(self, layer: Any) -> None:
        assert layer is self
        self.num_packed += 1


class OwnHead(Head):
    def tie_weights(self, embedding: Head) -> OwnHead:
        self.weight = embedding.weight
        return self


@pytest.mark.parametrize("is_own", [True, False], ids=["a module of its own", "the embedding itself"])
def test_a_tied_head_follows_the_embedding(is_own: bool) -> None:
    embedding = Head()
    head = OwnHead() if is_own else embedding
    config = SimpleNamespace(tie_word_embeddings=True)
    model = SimpleNamespace(config=config, lm_head=head, model=SimpleNamespace(embed_tokens=embedding))
    embedding.weight = torch.ones(1)  # a reload has put another tensor there
    tie_head(SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model)))
    assert model.lm_head.weight is embedding.weight and head.num_packed == 1


@contextmanager
def engine_that(load: Callable[[Any], None]) -> Iterator[VllmEngine]:
    """An engine around a vLLM whose reload is `load`."""

    def collective_rpc(what: Any, kwargs: Any = None) -> None:
        if what == "reload_weights":
            load(kwargs["weights_iterator"])

    llm = SimpleNamespace(collective_rpc=collective_rpc, reset_prefix_cache=lambda: True)
    engine = object.__new__(VllmEngine)
    engine._drive_engine(llm, VllmWords(None))
    engine.config = VllmEngine.Config(model=ModelConfig(path="nowhere"))
    engine._is_cpu, engine._folder, engine._expected = True, None, {"a": (2,), "b": (2,)}
    try:
        yield engine
    finally:
        engine.close()


def test_weights_from_a_sender_that_uses_its_memory_again_arrive_as_they_were_sent() -> None:
    loaded: dict[str, torch.Tensor] = {}
    buffer = torch.zeros(2)

    def sent() -> Any:
        for value, name in enumerate(("a", "b"), start=1):
            yield name, buffer.fill_(value)

    def load(weights: Any) -> None:
        loaded.update(list(weights))  # as vLLM does with a layer's

    with engine_that(load) as engine:
        engine.update_weights(sent(), PolicyVersion(1))
        assert loaded["a"].tolist() == [1, 1] and loaded["b"].tolist() == [2, 2] and engine.version == 1


def test_weights_that_are_not_whole_leave_the_engine_without() -> None:
    with engine_that(lambda weights: [None for _ in weights] and None) as engine:
        with pytest.raises(WeightSyncError):
            engine.update_weights([("a", torch.zeros(2))], PolicyVersion(1))
        assert engine.version == 0
        with pytest.raises(EngineError, match="update again"):
            engine.submit([])
