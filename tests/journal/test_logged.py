"""An engine behind the token log: what is asked again goes on from it, and kills do not change what is sampled."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from rill.inference.base import Completion, Delta, Feature, Request
from rill.inference.policy import EngineGate
from rill.journal.logged import LoggedEngine
from rill.journal.reader import LogReader
from rill.journal.token_log import WRITER_SHARE, JournalConfig, TokenLog
from rill.types import SamplingParams, StopReason

PROMPT = np.arange(4, dtype=np.int32)
END = 0


class CoinEngine:
    """Ends every answer with probability `p_end` at each token: lengths are geometric. Nothing is seeded."""

    features = frozenset({Feature.STREAM, Feature.SEEDED_BY_POSITION})

    def __init__(self, rng: np.random.Generator, p_end: float) -> None:
        self._rng = rng
        self._p_end = p_end
        self.running: dict[str, tuple[list[int], Future[Completion], Callable[[Delta], None]]] = {}
        self.num_given: list[int] = []

    def submit(
        self, requests: Sequence[Request], on_delta: Callable[[Delta], None] | None = None
    ) -> list[Future[Completion]]:
        assert on_delta is not None
        self.num_given += [len(request.token_ids) for request in requests]
        futures: list[Future[Completion]] = [Future() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            self.running[request.id] = ([], future, on_delta)
        return futures

    def abort(self, request_ids: Sequence[str] | None = None) -> None: ...

    def tick(self) -> None:
        """One token more for everybody."""
        for name, (tokens, future, on_delta) in list(self.running.items()):
            token = END if self._rng.random() < self._p_end else int(self._rng.integers(1, 100))
            tokens.append(token)
            reason = StopReason.EOS if token == END else None
            on_delta(Delta(request_id=name, **columns([token]), stop_reason=reason))
            if reason is not None:
                del self.running[name]
                future.set_result(Completion(request_id=name, **columns(tokens), stop_reason=reason))


def columns(tokens: list[int]) -> dict[str, np.ndarray]:
    return {
        "token_ids": np.array(tokens, np.int32),
        "logprobs": -np.array(tokens, np.float32),
        "versions": np.ones(len(tokens), np.int32),
    }


def killed(log: TokenLog) -> None:
    """As SIGKILL leaves it: what was not written is gone, and so is the lock."""
    log._closing.set()
    for thread in log._threads[1:]:
        thread.join()
    with log._writing, log._changed:
        log._pending, log._waiting = [], []
        log._is_closed = True
        os.close(log._fd)
        log._fd = -1
        log._changed.notify()


def lengths_under_kills(
    folder: Path, num: int, *, seed: int, mean_ticks: float, from_log: bool, p_end: float
) -> tuple[list[int], list[int]]:
    """The lengths of `num` answers while engines are killed at random, and what the engines were given."""
    rng = np.random.default_rng(seed)
    done: dict[str, Completion] = {}
    wanted = [
        Request(id=f"g{n:08d}/0#policy", token_ids=PROMPT, sampling=SamplingParams(max_new_tokens=10_000))
        for n in range(num)
    ]
    given: list[int] = []
    life = 0
    while len(done) < num:
        place = folder if from_log else folder / str(life)
        log = TokenLog(place, f"rollout-{life}", JournalConfig(delay_s=60, sync_s=0))
        engine = CoinEngine(rng, p_end)
        gate = EngineGate(engine)  # type: ignore[arg-type]
        logged = LoggedEngine(gate, log, decode=str)
        asked = [request for request in wanted if request.id not in done]
        futures = logged.submit(asked, 0)
        for tick in range(1 + int(rng.exponential(mean_ticks))):
            engine.tick()
            if tick % 4 == 3:
                log.flush()
        log.flush()
        for request, future in zip(asked, futures, strict=True):
            if request.id not in engine.running:
                done[request.id] = future.result(10)  # the writer's thread tells whoever waits
        engine.tick()  # said, and not written: lost with the process
        killed(log)
        given += engine.num_given
        life += 1
    return [len(done[request.id].token_ids) for request in wanted], given


def distance(one: Sequence[int], other: Sequence[int]) -> float:
    """Kolmogorov and Smirnov's: the largest difference of the two distribution functions."""
    points = np.unique([*one, *other])
    functions = [np.searchsorted(np.sort(each), points, side="right") / len(each) for each in (one, other)]
    return float(np.abs(functions[0] - functions[1]).max())


def test_kills_do_not_change_the_distribution_of_lengths_and_beginning_anew_would(tmp_path: Path) -> None:
    num, p_end = 600, 1 / 20
    undisturbed = np.random.default_rng(1).geometric(p_end, num).tolist()
    limit = 2.2 * np.sqrt(2 / num)  # one in ten thousand by chance
    hurt, given = lengths_under_kills(tmp_path / "log", num, seed=2, mean_ticks=6, from_log=True, p_end=p_end)
    assert max(given) > len(PROMPT), "answers were continued"
    assert distance(hurt, undisturbed) < limit
    anew, _ = lengths_under_kills(tmp_path / "anew", num, seed=3, mean_ticks=6, from_log=False, p_end=p_end)
    assert distance(anew, undisturbed) > 2 * limit, "and the test would see it"
    assert np.mean(anew) < 0.7 * np.mean(undisturbed), "short answers are preferred"


def test_a_finished_answer_is_not_asked_again_and_a_begun_one_goes_on_behind_its_tokens(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    requests = [
        Request(id=f"g0000000{n}/0#policy@1", token_ids=PROMPT, sampling=SamplingParams(max_new_tokens=50))
        for n in range(2)
    ]
    log = TokenLog(tmp_path, "rollout-0", JournalConfig(delay_s=60))
    quick, slow = CoinEngine(rng, 1.0), CoinEngine(rng, 0.0)
    for engine, request in zip((quick, slow), requests, strict=True):
        gate = EngineGate(engine)  # type: ignore[arg-type]
        LoggedEngine(gate, log, decode=str).submit([request], 0)
        for _ in range(7):
            engine.tick()
        log.flush()
    killed(log)

    again = TokenLog(tmp_path, "rollout-1", JournalConfig(delay_s=60))
    engine = CoinEngine(rng, 1.0)
    gate = EngineGate(engine)  # type: ignore[arg-type]
    asked = [Request(**{**_fields(r), "id": r.id.replace("@1", "@2")}) for r in requests]
    finished, continued = LoggedEngine(gate, again, decode=str).submit(asked, 0)
    assert finished.result(0).token_ids.tolist() == [END]
    assert engine.num_given == [len(PROMPT) + 7]
    engine.tick()
    whole = continued.result(10)
    assert len(whole.token_ids) == 8 and whole.token_ids[-1] == END and END not in whole.token_ids[:-1]
    np.testing.assert_array_equal(whole.logprobs, -whole.token_ids.astype(np.float32))
    again.close()


def _fields(request: Request) -> dict[str, object]:
    return {"token_ids": request.token_ids, "sampling": request.sampling}


def test_an_answer_that_was_cut_at_its_limit_is_finished(tmp_path: Path) -> None:
    log = TokenLog(tmp_path, "rollout-0", JournalConfig(delay_s=60))
    number = log.open("g00000000/0#policy", num_prompt=4, base=0)
    log.tokens(number, *columns(list(range(1, 6))).values())
    log.flush()
    killed(log)
    again = TokenLog(tmp_path, "rollout-1", JournalConfig(delay_s=60))
    engine = CoinEngine(np.random.default_rng(0), 1.0)
    gate = EngineGate(engine)  # type: ignore[arg-type]
    request = Request(id="g00000000/0#policy", token_ids=PROMPT, sampling=SamplingParams(max_new_tokens=5))
    (future,) = LoggedEngine(gate, again, decode=str).submit([request], 0)
    assert future.result(0).stop_reason is StopReason.LENGTH and engine.num_given == []
    again.close()


def test_sequences_that_begin_together_do_not_hand_over_their_tokens_in_one_step(tmp_path: Path) -> None:
    log = TokenLog(tmp_path, "rollout-0", JournalConfig(delay_s=1.0))
    times_s = [log.collect_s(nth) for nth in range(256)]
    log.close()
    assert max(times_s) + WRITER_SHARE * 1.0 <= 1.0, "and none is written later than delay_s"
    counts, _ = np.histogram(times_s, bins=16)
    assert counts.max() <= 2 * counts.mean()


BEHIND = """
import sys, threading, time
from pathlib import Path
now, behind_s = time.time, float(sys.argv[2])
time.time = lambda: now() - behind_s
time.time_ns = lambda: int(1e9 * time.time())
import numpy as np
from tests.journal.test_logged import *
log = TokenLog(Path(sys.argv[1]), sys.argv[3], JournalConfig(delay_s=60))
engine = CoinEngine(np.random.default_rng(0), 0.0)
request = Request(id="g00000000/0#policy", token_ids=PROMPT, sampling=SamplingParams(max_new_tokens=50))
LoggedEngine(EngineGate(engine), log, decode=str).submit([request], 0)
for _ in range(int(sys.argv[4])):
    engine.tick()
log.event("g00000000/0", "life", sys.argv[3])
print("written", flush=True)
time.sleep(60)
"""


def test_an_answer_goes_on_behind_its_tokens_where_the_clock_went_back_between_two_kills(
    tmp_path: Path,
) -> None:
    """Every life has a clock that is behind the one before: the second knows nothing but that it was begun."""
    for life, num_tokens in enumerate((0, 5, 4, 3)):
        arguments = [str(tmp_path), str(3600 * life), f"rollout-{9 - life}", str(num_tokens)]
        child = subprocess.Popen([sys.executable, "-c", BEHIND, *arguments], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"written\n"
        child.kill()
        child.wait()
    reader = LogReader(tmp_path)
    reader.read_all()
    found = reader.sequence("g00000000/0#policy")
    assert found is not None and len(found.token_ids) == 5 + 4 + 3
    assert reader.events("g00000000/0") == {"life": "rollout-6"}, "the last word is the last life's"
