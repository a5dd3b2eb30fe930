"""What every engine must do, as one suite that an engine's author runs.

    from tests.inference.conformance import EngineConformance

    class TestMyEngine(EngineConformance):
        @pytest.fixture(scope="class")
        @classmethod
        def engine(cls): ...              # an engine over `reference`'s weights, closed afterwards

        @pytest.fixture(scope="class")
        @classmethod
        def reference(cls): ...           # the same model as a transformers module, fp32, eager attention

A test whose feature the engine does not list is skipped, so the skips of a run say what the engine lacks. Override
`atol` for engines that compute in less than fp32.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from rill.errors import EngineError, RequestError, StuckError, WeightSyncError
from rill.inference.base import Completion, Delta, Engine, Feature, MemoryLevel, PauseMode, Request
from rill.types import PolicyVersion, SamplingParams, StopReason

_COUNTER = itertools.count()


def need(engine: Engine, feature: Feature) -> None:
    if feature not in engine.features:
        pytest.skip(f"{type(engine).__name__} does not list {feature}")


@torch.no_grad()
def expected_logprobs(reference: Any, tokens: Any, temperature: float = 1.0) -> np.ndarray[Any, Any]:
    ids = torch.tensor(np.asarray(tokens, dtype=np.int64))
    table = (reference(ids[None]).logits[0].float() / temperature).log_softmax(-1)
    return np.concatenate([[0.0], table[:-1].gather(1, ids[1:, None])[:, 0].numpy()])


class EngineConformance:
    atol = 1e-4
    """Largest difference of a log-probability from the reference's."""
    num_tokens = 12

    def request(self, tokens: Any, **sampling: Any) -> Request:
        sampling = {"max_new_tokens": self.num_tokens, "temperature": 0.0, "ignore_eos": True} | sampling
        return Request(
            id=f"conformance-{next(_COUNTER)}",
            token_ids=np.asarray(tokens, dtype=np.int32),
            sampling=SamplingParams(**sampling),
        )

    def prompt(self, engine: Engine, reference: Any, length: int, seed: int = 0) -> Any:
        return (
            np.random.default_rng(seed).integers(3, reference.config.vocab_size, size=length).astype(np.int32)
        )

    # --- generation --------------------------------------------------------------------------------------

    def test_it_names_its_limits(self, engine: Engine) -> None:
        assert engine.max_context > 1
        assert engine.version >= 0
        assert all(isinstance(feature, Feature) for feature in engine.features)

    def test_greedy_tokens_are_likeliest_and_logprobs_are_the_references(
        self, engine: Engine, reference: Any
    ) -> None:
        prompts = [self.prompt(engine, reference, n, seed=n) for n in (3, 17, 40)]
        for prompt, done in zip(prompts, engine.generate([self.request(p) for p in prompts], timeout_s=120)):
            assert len(done.token_ids) == len(done.logprobs) == len(done.versions) == self.num_tokens
            whole = np.concatenate([prompt, done.token_ids])
            expected = expected_logprobs(reference, whole)[len(prompt) :]
            np.testing.assert_allclose(done.logprobs, expected, atol=self.atol)
            with torch.no_grad():
                table = reference(torch.tensor(whole[:-1].astype(np.int64))[None]).logits[0].log_softmax(-1)
            best = table[len(prompt) - 1 :].max(-1).values.numpy()
            np.testing.assert_allclose(expected, best, atol=self.atol)  # ties within rounding are both greedy

    def test_results_come_in_the_order_of_the_requests(self, engine: Engine, reference: Any) -> None:
        batch = [
            self.request(self.prompt(engine, reference, 5, seed=i), max_new_tokens=n)
            for i, n in enumerate((9, 1, 5))
        ]
        done = engine.generate(batch, timeout_s=120)
        assert [c.request_id for c in done] == [r.id for r in batch]
        assert [len(c.token_ids) for c in done] == [9, 1, 5]
        assert all(c.stop_reason is StopReason.LENGTH for c in done)

    def test_sampled_logprobs_are_after_the_temperature_and_before_truncation(
        self, engine: Engine, reference: Any
    ) -> None:
        prompt = self.prompt(engine, reference, 9)
        done = engine.generate([self.request(prompt, temperature=0.7, top_p=0.8, top_k=20)], timeout_s=120)[0]
        whole = np.concatenate([prompt, done.token_ids])
        expected = expected_logprobs(reference, whole, temperature=0.7)[len(prompt) :]
        np.testing.assert_allclose(done.logprobs, expected, atol=self.atol)

    def test_a_stop_id_ends_a_request_and_is_part_of_it(self, engine: Engine, reference: Any) -> None:
        prompt = self.prompt(engine, reference, 6)
        free = engine.generate([self.request(prompt)], timeout_s=120)[0]
        stop = int(free.token_ids[3])
        done = engine.generate([self.request(prompt, stop_token_ids=(stop,))], timeout_s=120)[0]
        assert done.stop_reason is StopReason.STOP
        assert done.token_ids.tolist() == free.token_ids[: free.token_ids.tolist().index(stop) + 1].tolist()

    def test_a_seed_repeats_alone_and_in_company(self, engine: Engine, reference: Any) -> None:
        need(engine, Feature.SEEDED)
        prompts = [self.prompt(engine, reference, n, seed=n) for n in (4, 11, 30)]
        together = engine.generate([self.request(p, temperature=1.0, seed=7) for p in prompts], timeout_s=120)
        for prompt, other in zip(prompts, together):
            alone = engine.generate([self.request(prompt, temperature=1.0, seed=7)], timeout_s=120)[0]
            assert alone.token_ids.tolist() == other.token_ids.tolist()

    def test_logprobs_have_the_same_bits_in_every_batch(self, engine: Engine, reference: Any) -> None:
        need(engine, Feature.BATCH_INVARIANT)
        prompts = [self.prompt(engine, reference, n, seed=n) for n in range(3, 20)]
        together = engine.generate([self.request(p, temperature=1.0, seed=7) for p in prompts], timeout_s=120)
        for prompt, other in zip(prompts[::4], together[::4]):
            alone = engine.generate([self.request(prompt, temperature=1.0, seed=7)], timeout_s=120)[0]
            assert alone.logprobs.tolist() == other.logprobs.tolist()

    def test_deltas_add_up_to_the_completion(self, engine: Engine, reference: Any) -> None:
        need(engine, Feature.STREAM)
        deltas: list[Delta] = []
        (future,) = engine.submit([self.request(self.prompt(engine, reference, 5))], deltas.append)
        done = future.result(timeout=120)
        assert np.concatenate([d.token_ids for d in deltas]).tolist() == done.token_ids.tolist()
        assert np.concatenate([d.versions for d in deltas]).tolist() == done.versions.tolist()
        assert deltas[-1].stop_reason is done.stop_reason
        assert all(d.stop_reason is None for d in deltas[:-1])

    @pytest.mark.parametrize(
        ("tokens", "sampling"),
        [([], {}), ([-1], {}), ([10**6], {}), ([5], {"temperature": -1.0}), ([5], {"max_new_tokens": 0})],
    )
    def test_a_malformed_request_is_refused_before_anything_is_queued(
        self, engine: Engine, tokens: list[int], sampling: dict[str, Any]
    ) -> None:
        with pytest.raises(RequestError):
            engine.submit([self.request([5, 6]), self.request(tokens, **sampling)])
        assert engine.stats().num_waiting == engine.stats().num_running == 0

    def test_a_prompt_longer_than_the_context_is_refused(self, engine: Engine) -> None:
        with pytest.raises(RequestError):
            engine.submit([self.request(np.full(engine.max_context + 1, 5))])

    def test_abort_keeps_the_tokens_so_far(self, engine: Engine, reference: Any) -> None:
        prompt = self.prompt(engine, reference, 5)
        long = min(2000, engine.max_context - 10)
        (future,) = engine.submit([self.request(prompt, max_new_tokens=long)])
        time.sleep(0.05)
        engine.abort()
        done = future.result(timeout=60)
        assert done.stop_reason in (StopReason.ABORTED, StopReason.LENGTH)
        assert len(done.token_ids) == len(done.logprobs)

    # --- scoring -----------------------------------------------------------------------------------------

    def test_scores_are_the_references(self, engine: Engine, reference: Any) -> None:
        need(engine, Feature.SCORE)
        sequences = [self.prompt(engine, reference, n, seed=n) for n in (2, 33, 60)]
        for tokens, scores in zip(sequences, engine.score(sequences, timeout_s=120)):
            assert scores[0] == 0 and len(scores) == len(tokens)
            np.testing.assert_allclose(scores, expected_logprobs(reference, tokens), atol=self.atol)

    # --- control -----------------------------------------------------------------------------------------

    def test_a_paused_engine_says_so_when_a_wait_times_out(self, engine: Engine, reference: Any) -> None:
        need(engine, Feature.PARTIAL_ROLLOUT)
        engine.pause(PauseMode.INTERRUPT, timeout_s=60)
        try:
            with pytest.raises(StuckError):
                engine.generate([self.request(self.prompt(engine, reference, 5))], timeout_s=0.2)
        finally:
            engine.resume()

    def test_memory_comes_back_as_it_was(self, engine: Engine, reference: Any) -> None:
        need(engine, Feature.RELEASE_MEMORY)
        prompt = self.prompt(engine, reference, 20)
        before = engine.generate([self.request(prompt)], timeout_s=120)[0]
        for level in MemoryLevel:
            engine.pause(PauseMode.INTERRUPT, timeout_s=60)
            engine.release(level)
            engine.restore()
            engine.resume()
            after = engine.generate([self.request(prompt)], timeout_s=120)[0]
            assert after.token_ids.tolist() == before.token_ids.tolist()

    def test_an_interrupted_request_continues_under_new_weights(self, engine: Engine, reference: Any) -> None:
        need(engine, Feature.PARTIAL_ROLLOUT)
        need(engine, Feature.UPDATE_WEIGHTS)
        need(engine, Feature.STREAM)
        prompt = self.prompt(engine, reference, 12)
        old = int(engine.version)
        some = threading.Event()
        num_new = min(200, engine.max_context - 20)
        (future,) = engine.submit([self.request(prompt, max_new_tokens=num_new)], lambda _: some.set())
        assert some.wait(60)
        engine.pause(PauseMode.INTERRUPT, timeout_s=60)
        self.scale_weights(engine, reference, 1.05, old + 1)
        engine.resume()
        done = future.result(timeout=120)
        self.check_versions(done, prompt, old, reference)

    def test_after_an_update_nothing_comes_from_an_old_cache_entry(
        self, engine: Engine, reference: Any
    ) -> None:
        need(engine, Feature.UPDATE_WEIGHTS)
        prompt = self.prompt(engine, reference, 48)
        engine.generate([self.request(prompt)], timeout_s=120)
        version = int(engine.version) + 1
        self.scale_weights(engine, reference, 0.9, version)
        assert engine.version == version
        done = engine.generate([self.request(prompt)], timeout_s=120)[0]
        assert set(done.versions.tolist()) == {version}
        assert done.num_cached_tokens == 0
        expected = expected_logprobs(reference, np.concatenate([prompt, done.token_ids]))[len(prompt) :]
        np.testing.assert_allclose(done.logprobs, expected, atol=self.atol)

    def test_a_bad_update_leaves_the_engine_unavailable_until_a_good_one(
        self, engine: Engine, reference: Any
    ) -> None:
        need(engine, Feature.UPDATE_WEIGHTS)
        version = PolicyVersion(int(engine.version) + 1)
        with pytest.raises(WeightSyncError):
            engine.update_weights([("no.such.parameter", torch.zeros(1))], version)
        with pytest.raises(EngineError):
            engine.generate([self.request([5, 6, 7])], timeout_s=30)
        self.scale_weights(engine, reference, 1.0, int(version))
        assert len(engine.generate([self.request([5, 6, 7])], timeout_s=60)[0].token_ids) == self.num_tokens

    def test_a_version_must_grow_unless_its_owner_went_back(self, engine: Engine, reference: Any) -> None:
        need(engine, Feature.UPDATE_WEIGHTS)
        version = int(engine.version)
        with pytest.raises(WeightSyncError):
            self.scale_weights(engine, reference, 1.0, version)
        self.scale_weights(engine, reference, 1.0, version + 1)
        assert engine.version == version + 1
        engine.rewind()  # the trainer went back, and comes there again
        self.scale_weights(engine, reference, 1.0, version + 1)
        assert engine.version == version + 1

    # --- inside ------------------------------------------------------------------------------------------

    def scale_weights(self, engine: Engine, reference: Any, factor: float, version: int) -> None:
        """Change reference and engine alike."""
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.mul_(factor)
        engine.update_weights(
            [(n, p.detach()) for n, p in reference.named_parameters()], PolicyVersion(version)
        )

    def check_versions(self, done: Completion, prompt: Any, old: int, reference: Any) -> None:
        """Versions grow along the tokens, and the new ones' logprobs are those of `reference`, which is the new one."""
        versions = done.versions.tolist()
        assert versions == sorted(versions) and set(versions) <= {old, old + 1}
        whole = np.concatenate([prompt, done.token_ids])
        new = expected_logprobs(reference, whole)[len(prompt) :]
        mine = done.versions == old + 1
        np.testing.assert_allclose(done.logprobs[mine], new[mine], atol=self.atol)
