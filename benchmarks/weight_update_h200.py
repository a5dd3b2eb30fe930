"""All parameters of a 1.5B model from a trainer's process into an engine's, both on one GPU, by CUDA IPC.

    python benchmarks/weight_update_h200.py [--repeats 6] [--verify full sampled off]

One update is: gather and check on the publisher's side, manifest through a pipe, verify on the engine's side, copy into
its parameters, empty its cache; the clock runs in the publisher from the first to the engine's answer. Between two
updates the engine serves requests, so that there is a cache to empty, and the weights change. Prints one JSON line per
setting: the first update (handles are made and mapped) and the median of the others, in milliseconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from statistics import median
from typing import Any

import torch
from inference_h200 import make_engine, make_model, random_prompts, requests
from report import report

from rill.types import PolicyVersion
from rill.weights.base import open_publisher, open_receiver
from rill.weights.cuda_ipc import CudaIpcTransport

TARGET_MS = 20.0
WAIT_S = 240.0


def engine_process(verifies: list[str], pipe: Any) -> None:
    """Serves a little, takes every manifest that comes, says how long that took and what it then holds."""
    engine = make_engine(max_num_seqs=64, max_context=1024, kv_memory_fraction=0.1)
    parameters = dict(engine._runner.model.named_parameters())
    pipe.send("ready")
    for verify in verifies:
        receiver = open_receiver(CudaIpcTransport.Config(verify=verify))
        while (manifest := pipe.recv()) is not None:
            started = time.perf_counter()
            engine.update_weights(receiver.pull(manifest), manifest.version)
            updated = time.perf_counter()
            assert engine.version == manifest.version
            pipe.send(updated - started)
            engine.generate(
                requests(random_prompts(64, 128, int(manifest.version)), [8] * 64, f"{manifest.version}")
            )
            pipe.send({name: fingerprint(parameters[name]) for name in pipe.recv()})
        receiver.close()
    engine.close()


def fingerprint(tensor: torch.Tensor) -> int:
    return int(tensor.detach().view(torch.int16).long().sum().item())


def measure(verify: str, weights: dict[str, torch.Tensor], pipe: Any, versions: range) -> dict[str, Any]:
    publisher = open_publisher(CudaIpcTransport.Config(verify=verify))
    total_s, publish_s, update_s, num_bytes = [], [], [], 0
    for version in versions:
        for tensor in weights.values():
            tensor.mul_(1.001).add_(1e-4)
        torch.cuda.synchronize()
        started = time.perf_counter()
        manifest = publisher.publish(weights.items(), PolicyVersion(version))
        published = time.perf_counter()
        pipe.send(manifest)
        update_s.append(wait_for(pipe))
        total_s.append(time.perf_counter() - started)
        publish_s.append(published - started)
        num_bytes = manifest.num_bytes
        names = list(weights)[:: 50 + version]
        pipe.send(names)
        arrived = wait_for(pipe)
        assert arrived == {name: fingerprint(weights[name]) for name in names}, (
            "the engine holds other weights"
        )
    pipe.send(None)
    publisher.close()
    later = {name: 1000 * median(s[1:]) for name, s in (("t", total_s), ("p", publish_s), ("u", update_s))}
    return {
        "benchmark": "weight update between two processes on one GPU",
        "verify": verify,
        "gigabytes": round(num_bytes / 1e9, 2),
        "first_ms": round(1000 * total_s[0], 2),
        "ms": round(later["t"], 2),
        "publish_ms": round(later["p"], 2),
        "engine_ms": round(later["u"], 2),
        "all_ms": [round(1000 * s, 2) for s in total_s],
        "target_ms": TARGET_MS,
        "met": later["t"] <= TARGET_MS,
    }


def wait_for(pipe: Any) -> Any:
    if not pipe.poll(WAIT_S):
        raise TimeoutError(f"the engine's process did not answer within {WAIT_S:g} s")
    return pipe.recv()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--verify", nargs="*", default=["full", "sampled", "off"])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        report(skipped="needs a CUDA device")
        return
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=engine_process, args=(arguments.verify, there), daemon=True
    )
    process.start()
    model = make_model()
    weights = {name: p.data for name, p in model.named_parameters()}
    assert wait_for(here) == "ready"
    count = arguments.repeats + 1
    for index, verify in enumerate(arguments.verify):
        versions = range(1 + index * count, 1 + (index + 1) * count)
        report(**measure(verify, weights, here, versions))
    process.join(timeout=60)


if __name__ == "__main__":
    main()
