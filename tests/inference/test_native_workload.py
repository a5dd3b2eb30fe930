"""A random life of the engine changes nobody's tokens and loses no block.

Arrivals, aborts, pauses, weight updates, releases and a cache far too small run against one engine while a few
seeded requests are watched; each must come out as it does alone in an engine that does nothing else. Blocks are
recounted after every step, also while one is in flight; on a GPU in the end.
"""

from __future__ import annotations

import random
from concurrent.futures import Future
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch

from rill.inference.base import Completion, MemoryLevel, PauseMode, Request
from rill.inference.native import runners
from rill.inference.native.batch import IN_FLIGHT, StepBatch
from rill.inference.native.core import EngineCore
from rill.inference.native.engine import NativeEngine
from rill.inference.native.model_runner import CpuRunner, PendingTurn
from rill.models.loading import ModelConfig
from rill.types import PolicyVersion, SamplingParams, StopReason
from tests.inference.integrity import check_scheduler
from tests.inference.native_models import SHAPES, VOCAB, Oracle, make_engine, reference


def random_request(rng: random.Random, index: int, shared: list[int]) -> Request:
    prefix = shared[: rng.choice([0, 0, 16, 37])]
    tokens = prefix + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 50))]
    max_new_tokens = rng.randint(1, 40)
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=rng.choice([0.0, 0.7, 1.0, 1.3]),
        top_k=rng.choice([0, 0, 5]),
        top_p=rng.choice([1.0, 0.8]),
        min_p=rng.choice([0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.2]),
        min_new_tokens=min(rng.choice([0, 3]), max_new_tokens),
        logit_bias={} if rng.random() < 0.7 else {rng.randrange(VOCAB): 2.0},
        seed=index,
    )
    return Request(
        id=str(index),
        token_ids=np.array(tokens, dtype=np.int32),
        sampling=sampling,
        priority=rng.randint(0, 2),
        cache_salt=rng.choice(["", "", "other"]),
    )


def disturb(engine: NativeEngine, rng: random.Random, in_flight: list[str]) -> None:
    action = rng.choice(["abort", "interrupt", "release", "update", "flush", "score", "none", "none"])
    if action == "abort" and in_flight:
        engine.abort([rng.choice(in_flight)])
    elif action == "interrupt":
        engine.pause(PauseMode.INTERRUPT, timeout_s=30)
        engine.resume()
    elif action == "release":
        engine.pause(PauseMode.INTERRUPT, timeout_s=30)
        engine.release(rng.choice(list(MemoryLevel)))
        engine.restore()
        engine.resume()
    elif action == "update":  # to weights of the same values: a new version, and nobody's tokens change
        weights = [(name, p.data) for name, p in reference().named_parameters()]
        engine.update_weights(weights, PolicyVersion(engine.version + 1))
    elif action == "flush":
        engine.flush()
    elif action == "score":
        engine.score([np.arange(3, 60, dtype=np.int32)], timeout_s=30)


@pytest.mark.parametrize(("seed", "batch_invariant"), [(0, False), (1, False), (2, True)])
def test_a_random_workload_gives_each_request_what_it_gets_alone(seed: int, batch_invariant: bool) -> None:
    live_randomly(seed, batch_invariant, device="cpu", check_every_step=True)


class LateRunner(CpuRunner):
    """Reads a step late, as a GPU's runner does: the newest tokens are known by slot before the host has them."""

    is_overlapped = True

    def launch(self, steps: list[StepBatch]) -> PendingTurn:
        first, last = steps[0], self._last_tokens
        ids = first.token_ids_N
        for row in np.flatnonzero(ids == IN_FLIGHT):
            ids[row] = last[int(first.slots_B[row])]
        turn = super().launch(steps)
        for batch, tokens_S in zip(steps, turn().tokens_KS, strict=True):
            last |= dict(zip(batch.sampled_slots_S.tolist(), tokens_S.tolist()))
        return turn

    @cached_property
    def _last_tokens(self) -> dict[int, int]:
        return {}


@pytest.mark.parametrize("seed", range(6, 10))
def test_a_random_workload_of_overlapped_steps_gives_each_request_what_it_gets_alone(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are recounted with a step in flight."""
    step = EngineCore.step
    num_in_flight = []

    def checked(core: EngineCore) -> None:
        step(core)
        num_in_flight.append(sum(seq.num_in_flight for seq in core.scheduler.running))
        check_scheduler(core.scheduler)

    monkeypatch.setattr(runners, "CpuRunner", LateRunner)
    monkeypatch.setattr(EngineCore, "step", checked)
    live_randomly(seed, batch_invariant=False, device="cpu", check_every_step=False)
    assert sum(count > 0 for count in num_in_flight) > 100


@pytest.mark.parametrize(
    ("num_drafted", "by_model"),
    [(0, False), (7, False), (4, True)],
    ids=["several steps", "drafts", "draft model"],
)
def test_turns_of_several_tokens_give_each_request_what_single_steps_do(
    num_drafted: int, by_model: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends by limit, id and end of sequence in the middle of a turn; arrivals, an abort and an update between turns."""
    num_steps = 4
    lengths: list[int] = []

    class Noted(LateRunner):
        uses_graphs = True  # prompts wait for company

        def launch(self, steps: list[StepBatch]) -> PendingTurn:
            lengths.append(len(steps))
            return super().launch(steps)

    monkeypatch.setattr(runners, "CpuRunner", Noted)
    if not by_model:
        Oracle.install(monkeypatch)
    monkeypatch.setattr(CpuRunner, "num_verified_rows", 64)
    rng = random.Random(num_steps)
    options: dict[str, Any] = {"num_kv_blocks": 200, "max_batched_tokens": 128, "check_every_step": False}
    several = make_engine(
        num_scheduler_steps=num_steps, num_speculative_tokens=num_drafted, max_num_seqs=64,
        draft_model=ModelConfig(shape=SHAPES["llama"]) if by_model else None, **options,
    )  # fmt: skip
    if by_model:
        inside: Any = several._core
        inside._draft_model.cost, inside._draft_model.round_cost, inside._speculator.pace = 0.1, 0.0, None
    single = make_engine(num_scheduler_steps=1, **options)
    try:
        requests = [plain_request(rng, index) for index in range(30)]
        answers = single.generate(requests, timeout_s=60)
        Oracle.tell(answers)
        futures: list[Future[Completion]] = []
        for start in range(0, 30, 10):
            futures += several.submit(requests[start : start + 10])
            several.score([np.arange(3, 40, dtype=np.int32)], timeout_s=30)
            weights = [(name, p.data) for name, p in reference().named_parameters()]
            several.update_weights(weights, PolicyVersion(several.version + 1))
        several.abort(["29"])
        done = [future.result(timeout=60) for future in futures]
        assert num_drafted or max(lengths) == num_steps
        assert several.stats().num_free_kv_blocks == 199
        assert (several.stats().num_accepted_tokens > 100) == bool(num_drafted)
        for expected, found in zip(answers[:29], done):
            assert found.token_ids.tolist() == expected.token_ids.tolist()
            assert found.stop_reason is expected.stop_reason
            np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    finally:
        several.close()
        single.close()


def plain_request(rng: random.Random, index: int) -> Request:
    """Nothing in it keeps the host in step with the device."""
    tokens = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 40))]
    sampling = SamplingParams(
        max_new_tokens=rng.randint(1, 40),
        temperature=rng.choice([0.0, 1.0, 1.5]),
        top_p=rng.choice([1.0, 0.8]),
        stop_token_ids=tuple(rng.sample(range(3, VOCAB), rng.choice([0, 3]))),
        seed=index,
    )
    return Request(id=str(index), token_ids=np.array(tokens, dtype=np.int32), sampling=sampling)


@pytest.mark.gpu
@pytest.mark.parametrize("check_every_step", [True, False], ids=["step by step", "overlapped"])
@pytest.mark.parametrize(("seed", "batch_invariant"), [(3, False), (4, False), (5, True)])
def test_a_random_workload_on_a_gpu_gives_each_request_what_it_gets_alone(
    seed: int, batch_invariant: bool, check_every_step: bool
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    live_randomly(seed, batch_invariant, device="cuda", check_every_step=check_every_step)


def live_randomly(seed: int, batch_invariant: bool, *, device: str, check_every_step: bool) -> None:
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB) for _ in range(40)]
    options: dict[str, Any] = {"device": device, "dtype": "float32", "batch_invariant": batch_invariant}
    options["check_every_step"] = check_every_step
    crowded = make_engine(num_kv_blocks=14, max_batched_tokens=24, **options)
    alone = make_engine(num_kv_blocks=200, max_batched_tokens=256, **options)
    futures: dict[str, Future[Completion]] = {}
    requests: dict[str, Request] = {}
    try:
        for index in range(0, 28, 4):
            group = [random_request(rng, index + i, shared) for i in range(4)]
            requests |= {r.id: r for r in group}
            futures |= dict(zip([r.id for r in group], crowded.submit(group)))
            disturb(crowded, rng, [i for i, f in futures.items() if not f.done()])
        num_compared = 0
        for name, future in futures.items():
            done = future.result(timeout=60)
            if done.stop_reason is StopReason.ABORTED:
                continue
            expected = alone.generate([requests[name]], timeout_s=30)[0]
            assert done.token_ids.tolist() == expected.token_ids.tolist(), requests[name]
            if batch_invariant:
                assert done.logprobs.tolist() == expected.logprobs.tolist()
            else:
                np.testing.assert_allclose(done.logprobs, expected.logprobs, atol=1e-4)
            num_compared += 1
        assert num_compared >= 12
        assert crowded.stats().num_preempted > 0, "the cache was not small enough to tell anything"
        assert crowded.stats().num_free_kv_blocks == crowded.stats().num_kv_blocks
        check_scheduler(crowded._core.scheduler)
    finally:
        crowded.close()
        alone.close()


def test_weight_updates_in_the_middle_never_mix_versions() -> None:
    """Every token's logprob is that of the version stamped on it, given all tokens before it."""
    rng = random.Random(0)
    engine = make_engine(num_kv_blocks=20)
    versions: dict[int, Any] = {0: reference()}
    try:
        futures = engine.submit([random_request_plain(rng, i) for i in range(12)])
        for version in range(1, 4):
            model = reference()
            for parameter in model.parameters():
                parameter.data.mul_(1 + 0.1 * version)
            versions[version] = model
            engine.update_weights([(n, p.data) for n, p in model.named_parameters()], PolicyVersion(version))
        seen: set[int] = set()
        for index, future in enumerate(futures):
            done = future.result(timeout=60)
            prompt = random_request_plain(random.Random(0), index, skip=index).token_ids
            whole = torch.tensor(np.concatenate([prompt, done.token_ids]).astype(np.int64))
            for version in set(done.versions.tolist()):
                seen.add(version)
                with torch.no_grad():
                    table = versions[version](whole[None]).logits[0].log_softmax(-1)
                expected = table[:-1].gather(1, whole[1:, None])[len(prompt) - 1 :, 0].numpy()
                mine = done.versions == version
                # Larger weights round more: an order below what tells one version from the next.
                np.testing.assert_allclose(done.logprobs[mine], expected[mine], atol=1e-3)
                with torch.no_grad():
                    other = versions[version - 1 if version else 1](whole[None]).logits[0].log_softmax(-1)
                assert (other - table).abs().mean() > 1e-2
            assert (np.diff(done.versions) >= 0).all()
        assert 3 in seen
    finally:
        engine.close()


def random_request_plain(rng: random.Random, index: int, skip: int = 0) -> Request:
    for _ in range(skip):
        [rng.randrange(3, VOCAB) for _ in range(20)]
    tokens = [rng.randrange(3, VOCAB) for _ in range(20)]
    return Request(
        id=str(index),
        token_ids=np.array(tokens, dtype=np.int32),
        sampling=SamplingParams(max_new_tokens=40, temperature=1.0, ignore_eos=True, seed=index),
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_requests_leave_no_growth_behind() -> None:
    import gc
    import resource

    engine = make_engine(num_kv_blocks=200, max_num_seqs=64, max_batched_tokens=1024, check_every_step=False)
    rng = random.Random(1)
    try:
        peaks = []
        for start in range(0, 10_000, 500):
            batch = [
                Request(
                    id=str(start + i),
                    token_ids=np.array(
                        [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 40))], dtype=np.int32
                    ),
                    sampling=SamplingParams(max_new_tokens=4, ignore_eos=True),
                )
                for i in range(500)
            ]
            engine.generate(batch, timeout_s=300)
            gc.collect()
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        assert engine.stats().num_finished == 10_000
        assert engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks
        assert peaks[-1] - peaks[4] < 20_000, f"resident memory grew from {peaks[4]} to {peaks[-1]} KiB"
    finally:
        engine.close()
