"""The native engine on one H200: how fast is it, where does the time go.

    python benchmarks/inference_h200.py [--steps 4] [--only fixed,profile,few,wide,tail,narrow,groups,update,…]

Prints one JSON line per result. The model has the shape of Qwen2.5-1.5B with random bf16 weights. Bounds are taken
from the bytes and operations that the work needs and the rates measured on the first card (4.27 TB/s, 771 TFLOP/s);
`ceilings` has a copy and one large product on the card at hand, hot; it is no bound, for other products ran faster.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
import traceback
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import torch
from report import report
from shapes import QWEN_1_5B

from rill.inference.base import MemoryLevel, PauseMode, Request
from rill.inference.native.cuda_runner import CudaRunner
from rill.inference.native.engine import NativeEngine
from rill.models.loading import ModelConfig, load_model_config
from rill.types import PolicyVersion, SamplingParams

BYTES_PER_S, FLOP_PER_S = 4.27e12, 771e12
NUM_PARAMETERS = 1.544e9
KV_BYTES_PER_TOKEN = 28 * 2 * 2 * 128 * 2


def make_model(shape: dict[str, Any] = QWEN_1_5B) -> Any:
    """Drawn on the GPU: drawing 1.5 billion numbers on the host takes half a minute."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        config = load_model_config(ModelConfig(shape=shape))
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def make_engine(model: Any = None, **options: Any) -> NativeEngine:
    options = {
        "max_batched_tokens": 16384,
        "max_context": 6144,
        "kv_memory_fraction": 0.5,
    } | options
    config = NativeEngine.Config(model=ModelConfig(shape=QWEN_1_5B), device="cuda", **options)
    return NativeEngine(config, model=model or make_model(), owns_model=True)


def requests(prompts: list[Any], lengths: list[int], tag: str, **sampling: Any) -> list[Request]:
    return [
        Request(
            id=f"{tag}-{i}",
            token_ids=p,
            sampling=SamplingParams(max_new_tokens=n, ignore_eos=True, **({"seed": i} | sampling)),
        )
        for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
    ]


def random_prompts(count: int, length: int, seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 151936, size=length).astype(np.int32) for _ in range(count)]


def timed(engine: NativeEngine, batch: list[Request]) -> tuple[float, int]:
    start = time.perf_counter()
    done = engine.generate(batch, timeout_s=300)
    return time.perf_counter() - start, sum(len(c.token_ids) for c in done)


def bound_s(num_seqs: int, prompt: int, new: int) -> float:
    """Every step reads the weights once and each sequence's cache; prompts are matrix work."""
    prefill = 2 * NUM_PARAMETERS * num_seqs * prompt / FLOP_PER_S
    step = max(2 * NUM_PARAMETERS / BYTES_PER_S, 2 * NUM_PARAMETERS * num_seqs / FLOP_PER_S)
    cache = num_seqs * (prompt + new / 2) * KV_BYTES_PER_TOKEN / BYTES_PER_S
    return prefill + new * (step + cache)


def ceilings() -> None:
    """What a large copy and a large product reach here, hot."""
    report(ceiling="TFLOP/s of a bf16 product", measured=ceiling_of_products())
    big = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    copied = torch.empty_like(big)
    rate = hot_rate(lambda: copied.copy_(big), 2 * big.numel())
    report(ceiling="TB/s of a copy", measured=rate)


def ceiling_of_products() -> float:
    x = torch.randn(8192, 8192, device="cuda").bfloat16()
    return hot_rate(lambda: x @ x, 2 * 8192**3)


def hot_rate(call: Callable[[], Any], work: float) -> float:
    """Of 10^12 units of work a second, after one second of the same."""
    start = time.perf_counter()
    while time.perf_counter() - start < 1.0:
        call()
        torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(40):
        call()
    end.record()
    torch.cuda.synchronize()
    return round(work * 40 / (begin.elapsed_time(end) / 1000) / 1e12, 2)


def fixed(engine: NativeEngine) -> float:
    timed(engine, requests(random_prompts(256, 128, 1), [256] * 256, "warm"))
    best = 0.0
    for attempt in range(3):
        seconds, tokens = timed(
            engine, requests(random_prompts(256, 128, 2 + attempt), [256] * 256, f"run{attempt}")
        )
        best = max(best, tokens / seconds)
    bound = 256 * 256 / bound_s(256, 128, 256)
    report(
        result="fixed 256 x 128 + 256",
        tokens_per_s=round(best),
        bound=round(bound),
        share=round(best / bound, 3),
    )
    timed(engine, requests(random_prompts(8, 128, 8), [4] * 8, "warm-filter", top_p=0.9))
    for index, options in enumerate(({"top_p": 0.95}, {"top_k": 50, "top_p": 0.95})):
        seconds, tokens = timed(
            engine, requests(random_prompts(256, 128, 9 + index), [256] * 256, f"{options}", **options)
        )
        report(result=f"fixed with {options}", tokens_per_s=round(tokens / seconds))
    return best


def profile(engine: NativeEngine) -> None:
    timed(engine, requests(random_prompts(256, 128, 1), [64] * 256, "warm"))
    seconds, _ = timed(engine, requests(random_prompts(256, 128, 7), [1] * 256, "prompts"))
    report(result="256 prompts of 128 tokens", ms=round(1000 * seconds, 1))
    for count in (1, 4, 8):
        batches = [
            requests(random_prompts(count, 128, 90 + i), [1] * count, f"first{count}-{i}") for i in range(4)
        ]
        best = min(timed(engine, batch)[0] for batch in batches)
        report(result=f"first token of {count} prompts of 128 tokens", ms=round(1000 * best, 2))
    for count in (1, 16, 64):
        report(result=f"a decode step of {count} sequences", ms=step_ms(engine, count))
    kernels_of(engine, 22)


def kernels_of(engine: NativeEngine, num_kernels: int) -> None:
    """What a decode step of 256 sequences is made of."""
    futures = engine.submit(requests(random_prompts(256, 128, 2), [384] * 256, "profiled"))
    while engine.stats().num_waiting or engine.stats().num_running < 256:
        time.sleep(0.005)
    time.sleep(0.05)
    begin, start = engine.stats().extra["num_steps"], time.perf_counter()
    time.sleep(0.15)
    steps, seconds = engine.stats().extra["num_steps"] - begin, time.perf_counter() - start
    report(result="a decode step of 256 sequences", ms=round(1000 * seconds / max(1, steps), 3))
    begin, start = engine.stats().extra["num_steps"], time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        time.sleep(0.25)
    steps, seconds = engine.stats().extra["num_steps"] - begin, time.perf_counter() - start
    [f.result(timeout=120) for f in futures]
    report(result="profile", steps=steps, ms_per_step_with_profiler=round(1000 * seconds / max(1, steps), 3))
    events = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)[:num_kernels]
    total = sum(e.self_device_time_total for e in profiler.key_averages())
    for event in events:
        report(
            kernel=event.key[:70], share=round(event.self_device_time_total / total, 4), calls=event.count,
            us=round(event.self_device_time_total / max(1, event.count), 1),
        )  # fmt: skip
    report(result="device busy", ms=round(total / 1000, 1), of_ms=round(seconds * 1000, 1))


def step_ms(engine: NativeEngine, count: int) -> float:
    """Of `count` sequences, their prompts' step included in 200."""
    timed(engine, requests(random_prompts(count, 128, 11), [200] * count, f"warm{count}"))  # captures graphs
    begin = engine.stats().extra["num_steps"]
    seconds, _ = timed(engine, requests(random_prompts(count, 128, 12), [200] * count, f"few{count}"))
    return round(1000 * seconds / (engine.stats().extra["num_steps"] - begin), 3)


def few(engine: NativeEngine) -> None:
    """Steps of few rows by one launch, and kernel by kernel; then the tail of a rollout, which is made of them."""
    runner: Any = engine._runner
    one, lengths = runner._one_launch, log_normal_lengths()[:256]
    for name in ("one launch", "kernels"):
        runner._one_launch = one if name == "one launch" else None
        runner._graphs.drop()
        ms = {count: step_ms(engine, count) for count in (1, 2, 4, 8, 16)}
        report(result=f"decode steps by rows, {name}", ms=ms)
        timed(engine, requests(random_prompts(256, 128, 5), lengths, f"warm-{name}"))
        one_tail(engine, lengths, 256, name, 0.0)
    runner._one_launch = one
    runner._graphs.drop()


def wide(engine: NativeEngine) -> None:
    """Steps of many rows, with other products (the library's; up to 64 rows Triton's) in place of ours and with
    attention in Triton, by turns."""
    runner: Any = engine._runner
    own, attention = runner._wide, runner.decoder.ops._decode
    ways = ("ours", "other products", "attention in Triton")
    least: dict[str, dict[int, float]] = {way: {} for way in ways}
    most: dict[str, int] = dict.fromkeys(ways, 0)
    for attempt in range(2):
        for index, way in enumerate(ways):
            runner._wide = None if way == "other products" else own
            attention.uses_copies = way != "attention in Triton"
            runner._graphs.drop()
            for count in (32, 64, 96, 128, 192, 256, 320, 384, 448, 512):
                least[way][count] = min(step_ms(engine, count), least[way].get(count, 1e9))
            prompts = random_prompts(256, 128, 600 + len(ways) * attempt + index)  # nobody has computed them
            seconds, tokens = timed(engine, requests(prompts, [256] * 256, f"{way}{attempt}"))
            most[way] = max(most[way], round(tokens / seconds))
    runner._wide, attention.uses_copies = own, True
    runner._graphs.drop()
    for way in ways:
        report(
            result=f"decode steps by rows, {way}, best of two", ms=least[way], fixed_tokens_per_s=most[way]
        )


def log_normal_lengths() -> list[int]:
    rng = np.random.default_rng(0)
    sigma = 1.0
    drawn = rng.lognormal(np.log(256) - sigma**2 / 2, sigma, size=2560)
    return [int(length) for length in np.clip(drawn, 8, 4096)]


def tail(engine: NativeEngine, fixed_rate: float) -> None:
    """Log-normal lengths: many requests in a queue, and 256 at once."""
    lengths = log_normal_lengths()
    timed(engine, requests(random_prompts(1024, 128, 5), lengths[:1024], "warm-tail"))
    one_tail(engine, lengths, CudaRunner.usual_num_slots, "queue", fixed_rate)
    one_tail(engine, lengths[:256], 256, "no queue", fixed_rate)


def narrow(engine: NativeEngine, fixed_rate: float) -> None:
    """The same requests with half the slots."""
    lengths = log_normal_lengths()
    other = make_engine(engine._runner.model, max_num_seqs=256, kv_memory_fraction=0.6)
    timed(other, requests(random_prompts(512, 128, 5), lengths[:512], "warm-narrow"))
    one_tail(other, lengths, 256, "narrow", fixed_rate)
    other.close()


def one_tail(engine: NativeEngine, lengths: list[int], num_slots: int, tag: str, fixed_rate: float) -> None:
    begin, start = engine.stats(), time.perf_counter()
    futures = engine.submit(requests(random_prompts(len(lengths), 128, 31), lengths, tag))
    while engine.stats().num_waiting or not engine.stats().num_running:
        time.sleep(0.002)
    queued_s = time.perf_counter() - start
    sustained = (engine.stats().num_generated_tokens - begin.num_generated_tokens) / queued_s
    [f.result(timeout=300) for f in futures]
    seconds = time.perf_counter() - start
    bound = sum(lengths) / tail_bound_s(lengths, num_slots, 128)
    report(
        result=f"log-normal lengths, {len(lengths)} requests, {num_slots} slots",
        tokens_per_s=round(sum(lengths) / seconds),
        of_fixed=round(sum(lengths) / seconds / fixed_rate, 3) if fixed_rate else None,
        bound=round(bound),
        share=round(sum(lengths) / seconds / bound, 3),
        seconds=round(seconds, 2),
        seconds_until_the_queue_was_empty=round(queued_s, 2),
        tokens_per_s_until_then=round(sustained),
        steps=engine.stats().extra["num_steps"] - begin.extra["num_steps"],
        mean=round(float(np.mean(lengths))),
        longest=max(lengths),
    )


def tail_bound_s(lengths: list[int], num_slots: int, prompt: int) -> float:
    """Requests start in order as slots become free; a step costs what it must read and multiply, nothing else."""
    left, context, waiting, seconds = np.zeros(0, int), np.zeros(0, int), list(lengths), 0.0
    while len(left) or waiting:
        started, waiting = waiting[: num_slots - len(left)], waiting[num_slots - len(left) :]
        left = np.concatenate([left, np.array(started, dtype=int)])
        context = np.concatenate([context, np.full(len(started), prompt)])
        work = 2 * NUM_PARAMETERS * (len(left) + len(started) * (prompt - 1)) / FLOP_PER_S
        seconds += max(2 * NUM_PARAMETERS / BYTES_PER_S, work)
        seconds += float(context.sum()) * KV_BYTES_PER_TOKEN / BYTES_PER_S
        left, context = left - 1, context + 1
        left, context = left[left > 0], context[left > 0]
    return seconds


def groups(engine: NativeEngine) -> None:
    timed(engine, requests(random_prompts(16, 1024, 101), [4] * 16, "warm"))
    prompts = [p for p in random_prompts(16, 1024, 102) for _ in range(16)]
    before = engine.stats()
    seconds, _ = timed(engine, requests(prompts, [1] * 256, "groups"))
    after = engine.stats()
    computed = (after.num_prompt_tokens - before.num_prompt_tokens) - (
        after.num_cached_tokens - before.num_cached_tokens
    )
    single, _ = timed(engine, requests(random_prompts(16, 1024, 103), [1] * 16, "single"))
    report(
        result="16 groups of 16 on 1,024-token prompts", prefill_work=round(computed / (16 * 1024), 3),
        seconds=round(seconds, 4), seconds_of_16_single=round(single, 4), ratio=round(seconds / single, 3),
    )  # fmt: skip


def cascade(engine: NativeEngine) -> None:
    """Decode steps of groups on long prompts: what a group shares is read once, and for each sample."""
    graphs = engine._runner._graphs  # type: ignore[attr-defined]
    for length in (512, 4096):
        prompts = [p for p in random_prompts(16, length, 301 + length) for _ in range(16)]
        rates = {}
        for shares in (True, False):
            graphs.shares_prefixes = shares
            timed(engine, requests(prompts, [16] * 256, f"warm-{length}-{shares}"))
            start, tokens = timed(engine, requests(prompts, [1] * 256, f"first-{length}-{shares}"))
            seconds, tokens = timed(engine, requests(prompts, [257] * 256, f"group-{length}-{shares}"))
            rates[shares] = (tokens - 256) / (seconds - start)
        graphs.shares_prefixes = True
        report(
            result=f"decode of 16 groups of 16 on {length}-token prompts",
            tokens_per_s=round(rates[True]),
            each_by_itself=round(rates[False]),
            ratio=round(rates[True] / rates[False], 2),
        )


def update(engine: NativeEngine) -> None:
    timed(engine, requests(random_prompts(64, 128, 1), [16] * 64, "warm"))
    fresh = [(name, torch.randn_like(p) * 0.02) for name, p in engine._runner.model.named_parameters()]
    torch.cuda.synchronize()
    times = []
    for version in range(1, 6):
        start = time.perf_counter()
        engine.update_weights(fresh, PolicyVersion(version))
        times.append(1000 * (time.perf_counter() - start))
    report(result="weight update, 1.5B bf16, same GPU", ms=[round(t, 2) for t in times])


def memory(engine: NativeEngine) -> None:
    prompt = random_prompts(1, 300, 1)
    first = engine.generate(requests(prompt, [32], "a", temperature=0.0))[0].token_ids.tolist()
    used = [torch.cuda.mem_get_info()[0]]
    timings = []
    rollout = {}
    lengths = log_normal_lengths()[:256]

    def roll_out(tag: str) -> float:
        return round(timed(engine, requests(random_prompts(256, 128, 6), lengths, tag))[0], 3)

    roll_out("warm-memory")
    engine.pause(PauseMode.INTERRUPT)
    engine.release(MemoryLevel.WEIGHTS)  # the first time they are moved
    engine.restore()
    engine.resume()
    roll_out("warm-memory-again")
    rollout["none"] = roll_out("memory")
    for level in MemoryLevel:
        engine.pause(PauseMode.INTERRUPT)
        start = time.perf_counter()
        engine.release(level)
        timings.append(round(time.perf_counter() - start, 3))
        used.append(torch.cuda.mem_get_info()[0])
        start = time.perf_counter()
        engine.restore()
        timings.append(round(time.perf_counter() - start, 3))
        engine.resume()
        rollout[level] = roll_out(f"memory-{level}")
        again = engine.generate(requests(prompt, [32], f"b{level}", temperature=0.0))[0].token_ids.tolist()
        report(
            result=f"release({level})",
            freed_gib=round((used[-1] - used[0]) / 2**30, 2),
            same_after=again == first,
        )
    report(result="release, restore seconds by level", seconds=timings)
    report(result="256 log-normal requests after a release of", seconds=rollout)


def growth(engine: NativeEngine) -> None:
    """10,000 requests, each with a prompt of its own: what the device and the process hold before and after."""
    rng = np.random.default_rng(0)
    held = []
    for start in range(0, 10_000, 1000):
        prompts = [rng.integers(0, 151936, size=n).astype(np.int32) for n in rng.integers(1, 257, size=1000)]
        timed(engine, requests(prompts, [8] * 1000, f"growth{start}"))
        free = torch.cuda.mem_get_info()[0]
        held.append((free >> 20, torch.cuda.memory_allocated() >> 20, _resident_mib()))
    report(
        result="10,000 requests: MiB free on the device, allocated by torch, resident in the host",
        after_2000=held[1],
        after_10000=held[-1],
        free_blocks=engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks,
    )


def _resident_mib() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20


def invariant(shared: NativeEngine) -> None:
    engine = make_engine(shared._runner.model, batch_invariant=True, kv_memory_fraction=0.3)
    many = random_prompts(256, 128, 7)
    batch = engine.generate(requests(many, [64] * 256, "many"), timeout_s=300)
    same = True
    for i in (0, 100, 255):
        alone = engine.generate([requests(many, [64] * 256, f"alone{i}")[i]])[0]
        same = same and alone.token_ids.tolist() == batch[i].token_ids.tolist()
        same = same and bool((alone.logprobs == batch[i].logprobs).all())
    seconds, tokens = timed(engine, requests(random_prompts(256, 128, 2), [256] * 256, "speed"))
    report(result="batch_invariant", bit_identical=same, tokens_per_s=round(tokens / seconds))
    engine.close()


def fp8() -> None:
    """bf16, weights of 8 bits, and keys and values too: rates, and what becomes of log-probabilities."""
    texts = random_prompts(16, 256, 77)
    wanted: list[Any] = []
    plain = 0.0
    for name, options in (
        ("bf16", {}),
        ("weights", {"quantization": "fp8"}),
        ("weights and cache", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    ):
        start = time.perf_counter()
        engine = make_engine(max_num_seqs=256, kv_memory_fraction=0.3, **options)
        start_s = time.perf_counter() - start
        scores = [s[1:] for s in engine.score(texts)]
        wanted = wanted or scores
        gap = np.concatenate([abs(a - b) for a, b in zip(scores, wanted, strict=True)])
        steps = {count: step_ms(engine, count) for count in (1, 16, 64, 256)}
        rates = []
        for attempt in range(3):
            seconds, tokens = timed(
                engine, requests(random_prompts(256, 128, 2 + attempt), [256] * 256, f"{name}{attempt}")
            )
            rates.append(tokens / seconds)
        seconds, _ = timed(engine, requests(random_prompts(256, 128, 7), [1] * 256, f"prompts {name}"))
        kernels_of(engine, 14)
        parameters = dict(engine._runner.model.named_parameters()).items()
        fresh = [(n, torch.randn(p.shape, device="cuda").mul_(0.02).bfloat16()) for n, p in parameters]
        torch.cuda.synchronize()
        for version in (1, 2, 3):
            start = time.perf_counter()
            engine.update_weights(fresh, PolicyVersion(version))
            update_s = time.perf_counter() - start
        del fresh, parameters
        engine.close()
        del engine
        torch.cuda.empty_cache()
        plain = plain or max(rates)
        report(
            result=f"FP8: {name}",
            tokens_per_s=round(max(rates)),
            of_bf16=round(max(rates) / plain, 3),
            step_ms=steps,
            prompts_ms=round(1000 * seconds, 1),
            gap_mean=round(float(gap.mean()), 4),
            gap_max=round(float(gap.max()), 4),
            update_ms=round(1000 * update_s, 1),
            start_s=round(start_s, 1),
        )


def speculation() -> None:
    """Few sequences with and without drafts, in turns, best of two. A model with random weights says nothing twice.
    Here the layers add next to nothing, so that the tied head finds the last token again: at temperature 0 it is
    repeated for ever, at 0.5 about every second time, at 1 never. All the work is done as ever."""
    model = make_model()
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_(2.0**-10)
        elif name == "model.norm.weight":
            parameter.data.mul_(0.2)  # logits of 6 for the last token and 0.15 for others
    plain, drafting = (
        make_engine(model, max_num_seqs=64, kv_memory_fraction=0.2, num_speculative_tokens=count)
        for count in (0, 15)
    )
    for count in (1, 16):
        for temperature in (0.0, 0.5, 1.0):
            by_turns("drafts", plain, drafting, count, temperature)
    plain.close()
    drafting.close()


def by_turns(what: str, plain: NativeEngine, drafting: NativeEngine, count: int, temperature: float) -> None:
    rates = {"plain": 0.0, "drafting": 0.0}
    for attempt in range(3):  # the first captures graphs
        before = drafting.stats()
        for name, engine in (("plain", plain), ("drafting", drafting)):
            prompts = random_prompts(count, 128, 500 + attempt)
            tag = f"{name}-{count}-{temperature}-{attempt}"
            seconds, tokens = timed(engine, requests(prompts, [256] * count, tag, temperature=temperature))
            if attempt:
                rates[name] = max(rates[name], tokens / seconds)
    after = drafting.stats()
    num_drafted = after.num_draft_tokens - before.num_draft_tokens
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    report(
        result=f"{what}, {count} sequences at temperature {temperature}",
        tokens_per_s=round(rates["drafting"]),
        without=round(rates["plain"]),
        ratio=round(rates["drafting"] / rates["plain"], 3),
        drafted_of_tokens=round(num_drafted / (256 * count), 3),
        accepted_of_drafted=round(num_accepted / max(1, num_drafted), 3),
    )


def draft_model() -> None:
    """Drafts of a second model: the first four layers of the model itself, beside whose others' part is made small, so
    that the two think alike; the smaller it is, the more. Logits are spread as wide as those of trained models. All the
    work is done as ever. How often a real model's drafts come true, random weights do not say."""
    from transformers import AutoModelForCausalLM

    shape_7b = QWEN_1_5B | {
        "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
    }  # fmt: skip
    num_layers = 4
    shapes = {"1.5B": QWEN_1_5B, "7B": shape_7b}
    for (size, shape), parts in product(shapes.items(), (2.0**-12, 2.0**-6)):
        model = make_model(shape)
        for name, parameter in model.named_parameters():
            if name == "model.norm.weight":
                parameter.data.mul_(400 / shape["hidden_size"] ** 0.5)
            elif (
                name.endswith(("o_proj.weight", "down_proj.weight")) and int(name.split(".")[2]) >= num_layers
            ):
                parameter.data.mul_(parts)
        with torch.device("cuda"):
            config = load_model_config(ModelConfig(shape=shape | {"num_hidden_layers": num_layers}))
            small = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        small.load_state_dict(model.state_dict(), strict=False)
        small.tie_weights()
        with tempfile.TemporaryDirectory() as folder:
            small.save_pretrained(folder)
            plain, drafting = (
                make_engine(model, max_num_seqs=64, kv_memory_fraction=0.2, **options)
                for options in ({}, {"num_speculative_tokens": 8, "draft_model": ModelConfig(path=folder)})
            )
        for count in (1, 4, 16):
            by_turns(f"{size}, draft model, others' part x {parts}", plain, drafting, count, 1.0)
        plain.close()
        drafting.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--only",
        default="ceilings,fixed,profile,few,wide,tail,narrow,groups,cascade,update,memory,growth,invariant,speculation,draft_model,fp8",
    )
    parser.add_argument("--steps", type=int, default=4, help="num_scheduler_steps: 1 is a step to a turn")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    if not torch.cuda.is_available():
        report(skipped="needs a CUDA device")
        return
    report(device=torch.cuda.get_device_name(), torch=torch.__version__)
    torch.backends.cuda.matmul.allow_tf32 = True
    alone = {"ceilings": ceilings, "fp8": fp8, "speculation": speculation, "draft_model": draft_model}
    for name in [n for n in wanted if n in alone]:  # with engines of their own, or none
        run_part(name, alone[name])
    wanted = [n for n in wanted if n not in alone]
    if not wanted:
        return
    start = time.perf_counter()
    engine = make_engine(num_scheduler_steps=arguments.steps)
    report(steps_to_a_turn=arguments.steps)
    report(part="load", seconds=round(time.perf_counter() - start, 1))
    rate = 0.0

    def fixed_part() -> None:
        nonlocal rate
        rate = fixed(engine)

    parts = {
        "fixed": fixed_part,
        "profile": lambda: profile(engine),
        "few": lambda: few(engine),
        "wide": lambda: wide(engine),
        "tail": lambda: tail(engine, rate),
        "narrow": lambda: narrow(engine, rate),
        "groups": lambda: groups(engine),
        "cascade": lambda: cascade(engine),
        "update": lambda: update(engine),
        "memory": lambda: memory(engine),
        "growth": lambda: growth(engine),
        "invariant": lambda: invariant(engine),
    }
    for name in wanted:
        run_part(name, parts[name])
    engine.close()


def run_part(name: str, part: Callable[[], None]) -> None:
    start = time.perf_counter()
    try:
        part()
    except Exception as error:  # noqa: BLE001 boundary: one failed part must not hide the others' figures
        traceback.print_exc()
        report(failed=name, error=str(error)[:300])
    report(part=name, seconds=round(time.perf_counter() - start, 1))


if __name__ == "__main__":
    main()
