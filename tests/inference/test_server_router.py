"""Replicas behind one address: routing, death in the middle of a request, restart, weights for late joiners."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rill.errors import EngineError, ModelError, PeerDiedError, RequestError, WeightSyncError
from rill.inference.base import ADAPTER_FILES, Delta, PauseMode, Request
from rill.inference.native.engine import NativeEngine
from rill.inference.parameters import Checkpoint
from rill.inference.replica import ReplicaProcess
from rill.inference.server import BackgroundServer, ServerConfig, create_app
from rill.inference.server.prefix_index import PrefixIndex
from rill.inference.server.router import Router, RouterConfig, Slot
from rill.models.loading import ModelConfig
from rill.models.tokenizer import build_char_tokenizer
from rill.types import PolicyVersion, SamplingParams, StopReason
from tests.inference.fake_engine import FakeEngine
from tests.inference.plain_http import http
from tests.inference.waiting import eventually

REFUSED = 10  # below what the fake engine generates: a continued request has its tokens as prompt


def request(name: str, length: int = 20, seed: int = 7, prompt: int = 4, first: int = 40) -> Request:
    ids = np.arange(first, first + prompt, dtype=np.int32) % 100
    return Request(id=name, token_ids=ids, sampling=SamplingParams(max_new_tokens=length, seed=seed))


@pytest.fixture(scope="module")
def router() -> Iterator[Router]:
    settings = RouterConfig(num_replicas=2, health_interval_s=0.2, health_timeout_s=5.0)
    router = Router(FakeEngine.Config(step_s=0.01, refused_token=REFUSED), settings)
    yield router
    router.close()


def ready(router: Router) -> int:
    return int(router.stats().extra["replicas"])


def busiest(router: Router) -> int:
    return max(router.slots, key=lambda s: s.replica.num_in_flight).index


def test_both_replicas_work_and_seeded_tokens_do_not_depend_on_which(router: Router) -> None:
    alone = FakeEngine()
    requests = [request(f"r{i}", seed=i, first=40 + i) for i in range(8)]
    expected = [c.token_ids.tolist() for c in alone.generate(requests)]
    assert [c.token_ids.tolist() for c in router.generate(requests, 30.0)] == expected
    assert router.stats().num_finished >= 8
    alone.close()


def test_a_killed_replica_costs_no_token_of_a_streamed_request(router: Router) -> None:
    eventually(lambda: ready(router) == 2)
    streamed: list[int] = []

    def on_delta(delta: Delta) -> None:
        streamed.extend(delta.token_ids.tolist())

    (future,) = router.submit([request("victim", length=120)], on_delta)
    eventually(lambda: len(streamed) > 5)
    engine = router.slots[busiest(router)].replica
    assert engine is not None
    os.kill(engine.pid, signal.SIGKILL)
    completion = future.result(60)
    alone = FakeEngine()
    (expected,) = alone.generate([request("victim", length=120)])
    alone.close()
    assert completion.token_ids.tolist() == expected.token_ids.tolist() == streamed
    assert completion.stop_reason is StopReason.LENGTH and len(completion.logprobs) == 120
    eventually(lambda: ready(router) == 2)
    assert router.stats().extra["retried"] >= 1


def test_a_request_that_is_not_streamed_continues_from_recorded_tokens(router: Router) -> None:
    eventually(lambda: ready(router) == 2)
    (future,) = router.submit([request("quiet", length=150)])
    time.sleep(0.6)
    flight = router._flights["quiet"]
    engine = router.slots[busiest(router)].replica
    assert engine is not None
    engine.kill()
    eventually(lambda: flight.num_losses == 1)
    assert flight.next_request().num_generated > 5, "it started again from nothing"
    assert len(future.result(60).token_ids) == 150
    eventually(lambda: ready(router) == 2)


def test_texts_that_are_scored_keep_no_other_call_waiting(tmp_path: Path) -> None:
    busy = tmp_path / "busy"
    busy.touch()
    router = Router(FakeEngine.Config(busy_file=str(busy)), RouterConfig(num_replicas=2))
    texts = [np.arange(40, 50, dtype=np.int32)] * 2
    with closing(router), ThreadPoolExecutor(9) as callers:
        try:
            scores = [callers.submit(router.score, texts) for _ in range(8)]
            assert callers.submit(router.stats).result(60).extra["replicas"] == 2
            assert not any(score.done() for score in scores)
        finally:
            busy.unlink()
        assert [[len(values) for values in score.result(60)] for score in scores] == [[10, 10]] * 8


def test_a_replica_that_joins_late_gets_the_weights_and_the_pause(router: Router, tmp_path: Path) -> None:
    eventually(lambda: ready(router) == 2)
    version = PolicyVersion(router.version + 1)
    router.update_weights([("a", torch.ones(3))], version)
    router.update_weights([("b", torch.ones(2))], PolicyVersion(version + 1), partial=True)
    engine = router.slots[0].replica
    assert engine is not None
    router.pause(PauseMode.INTERRUPT)
    engine.kill()
    eventually(lambda: ready(router) == 1)
    eventually(lambda: ready(router) == 2)
    assert router.slots[0].replica is not engine and router.slots[0].replica.version == version + 1
    futures = router.submit([request(f"held{i}", first=40 + 9 * i) for i in range(4)])
    time.sleep(0.3)
    assert not any(f.done() for f in futures)
    router.resume()
    assert {int(v) for f in futures for v in f.result(30).versions} == {version + 1}
    with pytest.raises(WeightSyncError):
        router.update_weights([], version)


def test_a_replica_that_joins_late_does_not_need_the_callers_checkpoint_any_more(
    router: Router, tmp_path: Path
) -> None:
    eventually(lambda: ready(router) == 2)
    version = PolicyVersion(router.version + 1)
    router.update_weights(Checkpoint.write([("a", torch.ones(3))], tmp_path / "model.safetensors"), version)
    (tmp_path / "model.safetensors").unlink()
    engine = router.slots[0].replica
    engine.kill()
    eventually(lambda: ready(router) == 1)
    eventually(lambda: ready(router) == 2)
    assert router.slots[0].replica is not engine and router.slots[0].replica.version == version
    gone = Checkpoint((tmp_path / "model.safetensors",))  # nothing to keep: the replicas say what is wrong
    with pytest.raises(WeightSyncError, match="cannot be read"):
        router.update_weights(gone, PolicyVersion(version + 1))


def test_a_replica_that_joins_after_a_rewind_is_rewound_too(router: Router) -> None:
    eventually(lambda: ready(router) == 2)
    router.update_weights([("a", torch.ones(3))], PolicyVersion(router.version + 1))
    router.rewind()
    router.slots[0].replica.kill()
    eventually(lambda: ready(router) == 1)
    eventually(lambda: ready(router) == 2)
    router.update_weights([("a", torch.ones(3))], PolicyVersion(1))
    assert [slot.replica.version for slot in router.slots] == [1, 1]


def test_a_replica_that_joins_after_a_version_came_a_second_time_has_all_that_the_others_have(
    router: Router,
) -> None:
    eventually(lambda: ready(router) == 2)
    version = PolicyVersion(router.version + 1)
    router.update_weights([("a", torch.ones(3))], version)
    router.update_weights([("b", torch.ones(3))], PolicyVersion(version + 1), partial=True)
    router.rewind()
    router.update_weights([("b", torch.ones(3))], version, partial=True)
    router.slots[0].replica.kill()
    eventually(lambda: ready(router) == 1)
    eventually(lambda: ready(router) == 2)
    assert [slot.replica.version for slot in router.slots] == [version, version]


def test_a_callback_that_raises_stops_neither_its_request_nor_its_replica(router: Router) -> None:
    eventually(lambda: ready(router) == 2)

    def broken(delta: Delta) -> None:
        raise ValueError("not mine")

    (future,) = router.submit([request("loud", length=10)], broken)
    assert len(future.result(20).token_ids) == 10
    assert len(router.generate([request(f"after{i}", first=50 + 9 * i) for i in range(4)], 20.0)) == 4


def test_a_replica_that_has_stopped_reading_is_found_out_and_replaced() -> None:
    settings = RouterConfig(num_replicas=1, health_interval_s=0.1, health_timeout_s=3.0)
    with closing(Router(FakeEngine.Config(), settings)) as router:
        engine = router.slots[0].replica
        assert engine is not None
        os.kill(engine.pid, signal.SIGSTOP)
        long = np.full(400, 40, dtype=np.int32)
        sampling = SamplingParams(max_new_tokens=2, seed=1)
        requests = [Request(id=f"full{i}", token_ids=long, sampling=sampling) for i in range(400)]
        futures = [future for one in requests for future in router.submit([one])]  # more than a pipe holds
        replaced = "submit waited until a process that does not read was replaced"
        assert router.slots[0].replica is engine, replaced
        assert all(len(future.result(30).token_ids) == 2 for future in futures)


def test_a_replica_whose_engine_died_is_replaced_and_its_requests_go_on(tmp_path: Path) -> None:
    fail_file = tmp_path / "fail"
    settings = RouterConfig(num_replicas=1, health_interval_s=0.2)
    with closing(Router(FakeEngine.Config(step_s=0.01, fail_file=str(fail_file)), settings)) as router:
        (future,) = router.submit([request("orphan", length=60)])
        time.sleep(0.2)
        fail_file.touch()
        assert len(future.result(30).token_ids) == 60
        assert router.stats().extra["retried"] >= 1  # more where a busy machine is slow to show its health


@pytest.mark.parametrize(
    "error", [WeightSyncError("not like the others"), ZeroDivisionError("a bug")], ids=repr
)
def test_a_replica_that_cannot_be_made_like_the_others_is_not_left_behind(
    router: Router, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    eventually(lambda: ready(router) == 2)
    started: list[ReplicaProcess] = []

    def refuse(replica: ReplicaProcess) -> None:
        started.append(replica)
        if len(started) == 1:
            raise error

    monkeypatch.setattr(router, "_catch_up", refuse)
    engine = router.slots[0].replica
    assert engine is not None
    engine.kill()
    eventually(lambda: len(started) == 2 and ready(router) == 2)
    eventually(lambda: started[0].is_dead)


def test_replicas_draw_different_numbers_and_not_the_same_again_after_a_restart() -> None:
    replicas = Router.__new__(Router)
    replicas._engine_config = NativeEngine.Config(model=ModelConfig(path="m"), seed=5)
    replicas.slots = [Slot(0), Slot(1)]
    seeds = []
    for _ in range(3):
        for slot in replicas.slots:
            slot.num_starts += 1
            seeds.append(replicas._config_of(slot).model_dump()["seed"])
    assert seeds[0] == 5 and len(set(seeds)) == 6


def test_weights_that_no_replica_takes_are_not_kept(router: Router) -> None:
    eventually(lambda: ready(router) == 2)
    before = sorted(router._spill.path.iterdir())
    with pytest.raises(WeightSyncError):
        router.update_weights([("unknown", torch.ones(3))], PolicyVersion(router.version + 1))
    assert sorted(router._spill.path.iterdir()) == before


def test_abort_keeps_the_tokens_so_far(router: Router) -> None:
    eventually(lambda: ready(router) == 2)
    (future,) = router.submit([request("gone", length=400)])
    time.sleep(0.2)
    router.abort(["gone"])
    completion = future.result(10)
    assert completion.stop_reason is StopReason.ABORTED and 0 < len(completion.token_ids) < 400


def test_scores_come_back_in_order(router: Router) -> None:
    eventually(lambda: ready(router) == 2)
    sequences = [np.arange(40, 40 + n, dtype=np.int32) for n in (3, 5, 2, 7, 4)]
    assert [len(s) for s in router.score(sequences)] == [3, 5, 2, 7, 4]


def test_samples_of_one_prompt_go_to_one_replica_and_prompts_spread(router: Router) -> None:
    eventually(lambda: ready(router) == 2)
    router.flush()
    groups = [
        [request(f"g{g}-{i}", prompt=60, first=40 + g * 7, length=5) for i in range(4)] for g in range(2)
    ]
    used = []
    for group in groups:
        router.submit(group)
        used.append({router._flights[r.id].replica.name for r in group if r.id in router._flights})
    assert all(len(slots) == 1 for slots in used) and used[0] != used[1]


def test_a_malformed_request_is_refused_before_anything_is_queued(router: Router) -> None:
    wrong = replace(request("bad"), token_ids=np.array([40, 10**6], np.int32))
    with pytest.raises(RequestError, match="vocabulary"):
        router.submit([request("fine"), wrong])
    with pytest.raises(RequestError, match="no adapter"):
        router.submit([replace(request("bad"), adapter="none")])
    assert "fine" not in router._flights


def test_what_only_the_engine_refuses_fails_alone(router: Router) -> None:
    eventually(lambda: ready(router) == 2)
    refused = replace(request("bad"), token_ids=np.array([40, REFUSED], np.int32))
    bad, good = router.submit([refused, replace(request("good"), token_ids=refused.token_ids[:1])])
    assert isinstance(bad.exception(10), RequestError)
    assert len(good.result(10).token_ids) == 20


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions/tokens", "/inference/v1/generate"])
def test_a_refusal_by_a_replica_is_a_status_and_not_an_event(router: Router, path: str) -> None:
    eventually(lambda: ready(router) == 2)
    config = ServerConfig(port=0)
    with BackgroundServer(create_app(router, build_char_tokenizer(), config), config) as server:
        for wrong in (REFUSED, 5000):
            ids = [40, wrong]
            body = {"prompt": ids, "tokens": ids, "token_ids": ids, "stream": True}
            answer = http.post(server.url + path, json=body, timeout=20)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["type"] == "invalid_request_error"
        assert http.get(server.url + "/metrics").text.count("rill_in_flight 0\n") == 1


def test_an_adapter_reaches_all_replicas_and_those_that_come_late(router: Router, tmp_path: Path) -> None:
    eventually(lambda: ready(router) == 2)
    for name in ADAPTER_FILES:
        (tmp_path / name).write_text("{}")
    router.load_adapter("math", tmp_path)
    shutil.rmtree(tmp_path)  # a late replica reads the router's own copy
    engine = router.slots[1].replica
    assert engine is not None
    engine.kill()
    eventually(lambda: ready(router) == 1)
    eventually(lambda: ready(router) == 2)
    requests = [replace(request(f"a{i}", first=40 + 7 * i), adapter="math") for i in range(4)]
    plain = [replace(r, id=f"{r.id}-plain", adapter=None) for r in requests]
    done = router.generate([*requests, *plain], 30.0)
    assert all(a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(done[:4], done[4:], strict=True))
    with pytest.raises(ModelError, match="holds no PEFT adapter"):
        router.load_adapter("other", tmp_path)
    router.unload_adapter("math")
    assert not router.adapters and not list(router._spill.path.glob(f"*/{ADAPTER_FILES[0]}"))


def test_the_server_survives_the_death_of_a_replica(router: Router) -> None:
    eventually(lambda: ready(router) == 2)
    config = ServerConfig(port=0)
    with BackgroundServer(create_app(router, build_char_tokenizer(), config), config) as server:
        body = {"prompt": "abcd", "max_tokens": 150, "seed": 3, "stream": True, "return_token_ids": True}
        with http.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            engine = router.slots[busiest(router)].replica
            assert engine is not None
            engine.kill()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        assert http.get(server.url + "/health").status_code == 200


def test_a_replica_that_hangs_is_ended_and_its_request_goes_on_elsewhere() -> None:
    settings = RouterConfig(num_replicas=2, health_interval_s=0.1, health_timeout_s=0.6)
    with closing(Router(FakeEngine.Config(step_s=0.01), settings)) as router:
        streamed: list[int] = []
        (future,) = router.submit(
            [request("stuck", length=100)], lambda d: streamed.extend(d.token_ids.tolist())
        )
        eventually(lambda: len(streamed) > 5)
        engine = router.slots[busiest(router)].replica
        assert engine is not None
        os.kill(engine.pid, signal.SIGSTOP)
        alone = FakeEngine()
        expected = alone.generate([request("stuck", length=100)])[0].token_ids.tolist()
        alone.close()
        assert future.result(60).token_ids.tolist() == expected == streamed
        eventually(lambda: ready(router) == 2)
        assert engine.is_dead


def test_an_engine_that_cannot_load_says_why() -> None:
    config = FakeEngine.Config(max_context=512)
    broken = config.model_copy(update={"type": "tests.inference.fake_engine:Missing"})
    with pytest.raises(EngineError, match="Missing"):
        Router(broken, RouterConfig())


def test_a_dead_replica_refuses_calls_and_submissions(router: Router) -> None:
    eventually(lambda: ready(router) == 2)
    replica = router.slots[0].replica
    replica.kill()
    eventually(lambda: replica.is_dead)
    with pytest.raises(PeerDiedError):
        replica.call("stats")
    with pytest.raises(PeerDiedError):
        replica.submit([request("y")])


def test_a_version_that_one_replica_does_not_take_is_in_service_and_it_comes_to_it(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry would have met engines that have it already."""
    eventually(lambda: ready(router) == 2)
    broken = router.slots[0].replica
    monkeypatch.setattr(broken, "call", _refuse)
    version = PolicyVersion(router.version + 1)
    router.update_weights([("a", torch.ones(3))], version)
    assert router.version == version
    eventually(lambda: ready(router) == 2 and router.slots[0].replica is not broken)
    assert [slot.replica.version for slot in router.slots] == [version, version]
    assert len(router.generate([request(f"served{i}", first=40 + 9 * i) for i in range(4)], 30.0)) == 4


def test_a_replica_whose_health_check_fails_is_started_again_and_the_next_one_too(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        eventually(lambda: ready(router) == 2)
        broken = router.slots[0].replica
        monkeypatch.setattr(broken, "call", _refuse)
        eventually(lambda: ready(router) == 2 and router.slots[0].replica is not broken)  # noqa: B023


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise WeightSyncError("not this one")


def test_the_prefix_index_matches_the_longest_common_prefix_and_forgets() -> None:
    index = PrefixIndex(capacity=10)
    prompt = np.arange(100, dtype=np.int32)
    index.insert(prompt, "", "r0")
    index.insert(prompt[:64], "", "r1")
    assert index.match(prompt, "") == {"r0": 100, "r1": 64}
    assert index.match(prompt, "salt") == {}
    index.forget("r0")
    assert index.match(prompt, "") == {"r1": 64}
    for start in range(20):
        index.insert(prompt[start : start + 32] + 1000, "", "r0")
    assert index.match(prompt, "") == {}
