"""The native engine on a CUDA device: same answers, overlapped and from graphs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rill.inference.base import Engine, MemoryLevel, PauseMode
from rill.inference.native.engine import NativeEngine
from rill.inference.native.sampler import SamplingBatch, sample
from rill.models.loading import ModelConfig, load_model
from rill.types import PolicyVersion
from tests.child import environment
from tests.inference.conformance import EngineConformance
from tests.inference.native_models import (
    SHAPES,
    check_greedy,
    check_weights_that_are_not_numbers,
    forward_logprobs,
    greedy_tokens,
    make_engine,
    prompts,
    reference,
    request,
)
from tests.inference.test_native_adapters import write_adapter

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("fast_path", [True, False], ids=["fused", "modules"])
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_greedy_tokens_and_logprobs_are_those_of_transformers(
    name: str, fast_path: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    check_greedy(
        name, monkeypatch, device="cuda", dtype="float32", fast_path=fast_path, check_every_step=False
    )


def test_samples_of_one_long_prompt_are_answered_as_if_each_were_read_alone() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    config = ModelConfig(shape=SHAPES["qwen2"] | {"max_position_embeddings": 1024})
    engine = NativeEngine(
        NativeEngine.Config(
            model=config, device="cuda", dtype="float32", num_kv_blocks=1000, max_num_seqs=32, max_batched_tokens=1024
        )
    )  # fmt: skip
    long, other = prompts((600, 40))
    try:
        asked = [request(i, long if i < 20 else other, temperature=1.0, seed=i) for i in range(24)]
        together = engine.generate(asked, timeout_s=110)
        graphs = engine._runner._graphs  # type: ignore[attr-defined]
        assert any(key.num_shared for key in graphs._graphs), "nothing was shared"
        graphs.shares_prefixes = False
        for one, again in zip(together, engine.generate(asked, timeout_s=110), strict=True):
            assert one.token_ids.tolist() == again.token_ids.tolist()
            np.testing.assert_allclose(one.logprobs, again.logprobs, atol=1e-4)
    finally:
        engine.close()


def test_drafts_of_a_second_model_change_no_token_also_after_a_release() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = ModelConfig(shape=SHAPES["qwen2"] | {"max_position_embeddings": 1024})
    plain, drafting = (
        NativeEngine(
            NativeEngine.Config(
                model=model, device="cuda", dtype="float32", num_kv_blocks=1000, max_num_seqs=64,
                max_batched_tokens=1024, **options,
            )
        )
        for options in ({}, {"draft_model": model, "num_speculative_tokens": 6})
    )  # fmt: skip
    drafts: Any = drafting._core._draft_model
    drafts.cost, drafts.round_cost = 0.1, 0.0
    drafting._core._speculator.pace = None  # type: ignore[union-attr]  # tiny models are faster without
    inputs = [*prompts((600,)) * 3, *prompts((40, 7, 1, 300))]
    asked = [
        request(i, p, max_new_tokens=80, temperature=0.0 if i % 2 else 1.0, top_p=0.9, seed=i)
        for i, p in enumerate(inputs)
    ]
    try:
        expected = plain.generate(asked, timeout_s=110)
        for level in (MemoryLevel.KV, MemoryLevel.GRAPHS, None):
            found = drafting.generate(asked, timeout_s=110)
            for one, other in zip(found, expected, strict=True):
                assert one.token_ids.tolist() == other.token_ids.tolist()
                np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
            if level is not None:
                drafting.release(level)
                drafting.restore()
        stats = drafting.stats()
        assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens > 500
    finally:
        plain.close()
        drafting.close()


def test_prompts_beside_generation_are_answered_from_graphs_as_without() -> None:
    """Long and short ones, samples of one prompt, a prompt that goes on from another's last token in the same step, and
    texts to be scored."""
    torch.backends.cuda.matmul.allow_tf32 = False
    config = ModelConfig(shape=SHAPES["qwen2"] | {"max_position_embeddings": 1024})
    *running, long, short, shared = prompts((30, 50, 9, 400, 3, 64))
    longer = np.concatenate([shared, short, short])
    found = []
    for cuda_graphs in (True, False):
        engine = NativeEngine(
            NativeEngine.Config(
                model=config, device="cuda", dtype="float32", num_kv_blocks=1000, max_num_seqs=64,
                max_batched_tokens=512, cuda_graphs=cuda_graphs,
            )
        )  # fmt: skip
        runner: Any = engine._runner
        replay, sizes = runner._replay_prompts, []
        runner._replay_prompts = lambda batch, size, replay=replay, sizes=sizes: (
            sizes.append((size, batch.num_running)), replay(batch, size)
        )[1]  # fmt: skip
        try:
            begun = engine.submit(
                [
                    request(i, prompt, max_new_tokens=200, temperature=1.0, seed=i)
                    for i, prompt in enumerate(running)
                ]
            )
            answers = []
            for turn in range(4):
                asked = [shared] * 5 + [longer, long, short, longer, shared[: 20 + turn]]
                answers += engine.generate(
                    [
                        request(f"{turn}-{i}", prompt, max_new_tokens=4, temperature=1.0, seed=i)
                        for i, prompt in enumerate(asked)
                    ],
                    timeout_s=110,
                )
            scores = engine.score([long, short, shared])
            answers += [future.result(timeout=110) for future in begun]
        finally:
            engine.close()
        found.append((answers, scores))
        assert bool(sizes) is cuda_graphs
        if cuda_graphs:
            assert any(num_running for _, num_running in sizes) and len({size for size, _ in sizes}) > 1
    (answers, scores), (wanted, wanted_scores) = found
    for one, again in zip(answers, wanted, strict=True):
        assert one.token_ids.tolist() == again.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, again.logprobs, atol=1e-4)
    for one, again in zip(scores, wanted_scores, strict=True):
        np.testing.assert_allclose(one, again, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("filters", [(0, 0.95, 0.0), (0, 0.5, 0.0), (50, 0.95, 0.0), (0, 0.3, 0.01)])
def test_filtered_tokens_are_those_of_the_host(filters: tuple[int, float, float], dtype: torch.dtype) -> None:
    from rill.inference.native.triton_sampler import TritonSampler  # Triton comes with CUDA's torch alone

    rows, vocab, generator = 128, 30_000, np.random.default_rng(0)
    logits = torch.from_numpy(generator.normal(size=(rows, vocab)) * 3).to(dtype)
    kinds = (np.int32, np.float32, np.float32)
    columns = [np.full(rows, value, dtype=kind) for value, kind in zip(filters, kinds, strict=True)]
    batch = SamplingBatch(np.ones(rows, dtype=np.float32), *columns, uniform_S=generator.random(rows))
    expected, scores = sample(logits.float(), batch)
    device = torch.device("cuda")
    slots, last, zero = (torch.arange(n, dtype=torch.int32, device=device) for n in (rows, rows, 1))
    words = [torch.ones(rows), torch.zeros(rows), torch.from_numpy(batch.uniform_S).float()]
    words += [torch.from_numpy(column) for column in columns]
    on_device = [slots, *(word.view(torch.int32).to(device) for word in words)]
    numbers = torch.empty(1, 2, rows, dtype=torch.int32, pin_memory=True)
    TritonSampler(rows, vocab, device)(logits.to(device), on_device, last, numbers, zero)
    torch.cuda.synchronize()
    same = numbers[0, 0] == expected
    assert same.float().mean() > 0.98, "but for a sum's last bits"
    assert torch.allclose(numbers[0, 1].view(torch.float32)[same], scores[same], atol=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_numbers_fail_the_request_and_harm_nothing(temperature: float) -> None:
    """The next step is launched before the host sees the token, which must be one that the embedding has."""
    engine = make_engine(device="cuda", check_every_step=False)
    try:
        check_weights_that_are_not_numbers(engine, temperature)
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_steps_of_few_rows_are_one_launch_through_releases_and_updates(name: str) -> None:
    """Sampled in one launch, scored by the kernels for many rows; rows end one after the other."""
    shape = SHAPES[name] | {
        "hidden_size": 512, "intermediate_size": 1408, "head_dim": 128, "initializer_range": 0.05,
        "num_key_value_heads": 2, "max_position_embeddings": 1024,
    }  # fmt: skip
    engine = NativeEngine(
        NativeEngine.Config(
            model=ModelConfig(shape=shape), device="cuda", num_kv_blocks=300, max_num_seqs=20, max_batched_tokens=1024
        )
    )  # fmt: skip
    inputs = prompts((40, 700, 7, 129), seed=3)
    lengths = (5, 60, 40, 90)

    def check(tag: str) -> None:
        asked = [
            request(f"{tag}{i}", p, max_new_tokens=n, seed=i, temperature=1.0)
            for i, (p, n) in enumerate(zip(inputs, lengths, strict=True))
        ]
        done = engine.generate(asked, timeout_s=110)
        whole = [np.concatenate([p, c.token_ids]) for p, c in zip(inputs, done, strict=True)]
        for prompt, completion, scores in zip(inputs, done, engine.score(whole), strict=True):
            difference = abs(scores[len(prompt) :] - completion.logprobs)
            assert difference.max() < 0.1 and difference.mean() < 0.02, "more than bf16 rounds"

    try:
        runner: Any = engine._runner
        assert runner._one_launch is not None
        check("first")
        for level in (MemoryLevel.WEIGHTS, MemoryLevel.KV, MemoryLevel.WEIGHTS):
            engine.pause(PauseMode.INTERRUPT)
            engine.release(level)
            engine.restore()
            engine.resume()
            check(f"after {level}")
        fresh = [(n, p + 0.02 * torch.randn_like(p)) for n, p in runner.model.named_parameters()]
        engine.update_weights(fresh, PolicyVersion(1))
        check("updated")
    finally:
        engine.close()


def test_captured_steps_outlive_a_release_of_the_memory_that_they_read() -> None:
    engine = make_engine(device="cuda", check_every_step=False, num_kv_blocks=100_000)
    asked = [request(i, prompt, temperature=1.0, seed=i) for i, prompt in enumerate(prompts((5, 9, 20)))]

    def released(level: MemoryLevel) -> int:
        engine.pause(PauseMode.INTERRUPT)
        free = torch.cuda.mem_get_info()[0]
        engine.release(level)
        return torch.cuda.mem_get_info()[0] - free

    def answered() -> list[list[int]]:
        engine.restore()
        engine.resume()
        return [each.token_ids.tolist() for each in engine.generate(asked, timeout_s=60)]

    try:
        runner: Any = engine._runner
        before, cached = answered(), 100_000 * runner.cache_shape.block_bytes
        released(MemoryLevel.WEIGHTS)  # moves them, once
        assert answered() == before
        graphs = dict(runner._graphs._graphs)
        for level in (MemoryLevel.KV, MemoryLevel.WEIGHTS):
            assert released(level) >= cached
            assert answered() == before
            assert runner._graphs._graphs == graphs, "one was captured again"
        released(MemoryLevel.WEIGHTS)
        tensors = [(name, 1.01 * p) for name, p in reference().named_parameters()]
        engine.update_weights(tensors, PolicyVersion(1))  # while they are out
        updated = answered()
        assert runner._graphs._graphs == graphs
        assert updated == [each.token_ids.tolist() for each in engine.generate(asked, timeout_s=60)] != before
        released(MemoryLevel.GRAPHS)
        assert not runner._graphs._graphs
        assert answered() == updated
    finally:
        engine.close()


def test_a_program_that_closed_its_engine_ends_as_it_should() -> None:
    program = """
from tests.inference.native_models import make_engine, prompts, request
engine = make_engine(device="cuda", check_every_step=False)
engine.generate([request(0, prompts((9,))[0])])
engine.close()
"""
    ended = subprocess.run([sys.executable, "-c", program], env=environment(), timeout=110, check=False)
    assert ended.returncode == 0


@pytest.mark.parametrize("num_seqs", [100, 8], ids=["many rows", "few rows"])
def test_long_and_short_contexts_in_one_batch_are_answered_as_if_alone(num_seqs: int) -> None:
    """Contexts of one piece and of many, in captured steps of several sizes; lengths make the batch shrink."""
    torch.backends.cuda.matmul.allow_tf32 = False
    shape = SHAPES["qwen2"] | {"max_position_embeddings": 4096, "num_key_value_heads": 1}
    config = ModelConfig(shape=shape)
    model = load_model(config, dtype=torch.float32, attention="eager")
    engine = NativeEngine(
        NativeEngine.Config(
            model=config, device="cuda", dtype="float32", num_kv_blocks=4000, max_num_seqs=num_seqs,
            max_batched_tokens=1024,
        )
    )  # fmt: skip
    try:
        inputs = prompts((2300, 130, 120, 700, *([9] * (num_seqs - 4))), seed=1)
        batch = [request(i, p, max_new_tokens=4 + i % 37) for i, p in enumerate(inputs)]
        for index, done in enumerate(engine.generate(batch, timeout_s=110)):
            if index < 8 or index % 20 == 0:
                whole = np.concatenate([inputs[index], done.token_ids])
                expected = forward_logprobs(model, whole)[len(inputs[index]) :]
                np.testing.assert_allclose(done.logprobs, expected, atol=1e-4)
    finally:
        engine.close()


@pytest.mark.parametrize("fast_path", [True, False], ids=["fused", "modules"])
def test_adapters_are_served_beside_the_base_model_from_captured_steps(
    tmp_path: Path, fast_path: bool
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    models = {None: reference(), "a": write_adapter(tmp_path / "a", 1), "b": write_adapter(tmp_path / "b", 2)}
    engine = make_engine(device="cuda", dtype="float32", fast_path=fast_path, check_every_step=False)
    try:
        for folder in ("a", "b"):
            engine.load_adapter(folder, tmp_path / folder)
        inputs = prompts((20, 33, 5, 40))
        for names in (["a", None, "b", "a"], [None] * 4, ["b", "b", None, None]):
            batch = [replace(request(i, p), adapter=n) for i, (p, n) in enumerate(zip(inputs, names))]
            for prompt, name, done in zip(inputs, names, engine.generate(batch, timeout_s=110)):
                assert done.token_ids.tolist() == greedy_tokens(models[name], prompt, 12), name
                whole = np.concatenate([prompt, done.token_ids])
                expected = forward_logprobs(models[name], whole)[len(prompt) :]
                np.testing.assert_allclose(done.logprobs, expected, atol=1e-4)
        if fast_path:
            assert any(key.has_adapters for key in engine._runner._graphs._graphs)  # type: ignore[attr-defined]
        engine.load_adapter(
            "a", tmp_path / "b"
        )  # the same name, other weights: captured steps must not be the old ones
        [done] = engine.generate([replace(request("again", inputs[0]), adapter="a")], timeout_s=110)
        assert done.token_ids.tolist() == greedy_tokens(models["b"], inputs[0], 12)
        engine.unload_adapter("b")
        [done] = engine.generate([replace(request("still", inputs[0]), adapter="a")], timeout_s=110)
        assert done.token_ids.tolist() == greedy_tokens(models["b"], inputs[0], 12)
    finally:
        engine.close()


class TestNativeCuda(EngineConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Iterator[Engine]:
        torch.backends.cuda.matmul.allow_tf32 = False
        engine = make_engine(device="cuda", dtype="float32", check_every_step=False)
        yield engine
        engine.close()

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls) -> Any:
        return reference()


class TestNativeCudaInvariant(TestNativeCuda):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Iterator[Engine]:
        engine = make_engine(device="cuda", dtype="float32", batch_invariant=True, check_every_step=False)
        yield engine
        engine.close()
