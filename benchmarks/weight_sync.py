"""How fast weights reach an engine: publish and pull, per transport, against the copy that memory allows.

    python benchmarks/weight_sync.py                       # CPU transports, a model of 0.5 GB
    python benchmarks/weight_sync.py --cuda --gigabytes 3  # cuda_ipc and shm from device tensors

One JSON line per transport: bytes, seconds (median), GB/s of publish and of pull, and the same for a plain copy of
the same tensors in the same run. The receiver of `shm`, `disk`, `tcp` and `cuda_ipc` is another process, as in a run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from typing import Any

import torch

from rill.types import PolicyVersion
from rill.weights.base import TRANSPORTS, open_publisher, open_receiver
from rill.weights.manifest import WeightManifest

CPU_TRANSPORTS = ("shm", "disk", "tcp")


def make_weights(gigabytes: float, device: str) -> dict[str, torch.Tensor]:
    """Layers of a transformer in bf16: seven matrices and two norms each."""
    width = 1536 if gigabytes >= 1 else 512
    shapes = {"q": (width, width), "k": (width // 4, width), "v": (width // 4, width), "o": (width, width)}
    shapes |= {"gate": (4 * width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    layer_bytes = 2 * sum(a * b for a, b in shapes.values())
    tensors = {}
    for layer in range(max(1, round(gigabytes * 1e9 / layer_bytes))):
        for name, shape in shapes.items():
            tensors[f"layers.{layer}.{name}.weight"] = torch.randn(shape, device=device).bfloat16()
        tensors[f"layers.{layer}.norm.weight"] = torch.ones(width, device=device).bfloat16()
    return tensors


def copy_into(target: dict[str, torch.Tensor], tensors: Any) -> None:
    for name, tensor in tensors:
        target[name].copy_(tensor)
    if next(iter(target.values())).is_cuda:
        torch.cuda.synchronize()


def receive(config: Any, gigabytes: float, device: str, pipe: Any) -> None:
    """The engine's process: pulls every manifest it is sent into weights of its own, as update_weights would."""
    torch.set_num_threads(1)
    own = make_weights(gigabytes, device)
    receiver = open_receiver(config)
    pipe.send("ready")
    while (manifest := pipe.recv()) is not None:
        started = time.perf_counter()
        copy_into(own, receiver.pull(manifest))
        pipe.send(time.perf_counter() - started)
    receiver.close()


def measure(
    name: str, settings: dict[str, Any], gigabytes: float, device: str, repeats: int
) -> dict[str, Any]:
    config = TRANSPORTS.load(name).Config.model_validate({"type": name, **settings})
    tensors = make_weights(gigabytes, device)
    publisher = open_publisher(config)
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=receive, args=(config, gigabytes, device, there), daemon=True
    )
    process.start()
    assert here.poll(300) and here.recv() == "ready"

    def pull(manifest: WeightManifest) -> float:
        here.send(manifest)
        if not here.poll(300):
            raise TimeoutError(f"{name}: the receiver did not answer within 300 s")
        return float(here.recv())

    publish_s, pull_s, num_bytes = [], [], 0
    for version in range(repeats + 1):
        for tensor in tensors.values():
            tensor[:1].add_(1e-2)
        started = time.perf_counter()
        manifest = publisher.publish(tensors.items(), PolicyVersion(version))
        published = time.perf_counter() - started
        pulled = pull(manifest)
        num_bytes = manifest.num_bytes
        if version:  # the first one makes buffers, files and maps
            publish_s.append(published)
            pull_s.append(pulled)
    here.send(None)
    process.join(timeout=60)
    publisher.close()
    return {
        "benchmark": "weight_sync",
        "transport": name,
        "settings": settings,
        "device": device,
        "gigabytes": round(num_bytes / 1e9, 3),
        "publish_s": round(statistics.median(publish_s), 4),
        "pull_s": round(statistics.median(pull_s), 4),
        "publish_gb_s": round(num_bytes / 1e9 / statistics.median(publish_s), 2),
        "pull_gb_s": round(num_bytes / 1e9 / statistics.median(pull_s), 2),
    }


def plain_copy(gigabytes: float, device: str, repeats: int) -> dict[str, Any]:
    """What memory allows: the same tensors copied once, nothing checked."""
    source, target = make_weights(gigabytes, device), make_weights(gigabytes, device)
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        copy_into(target, source.items())
        seconds.append(time.perf_counter() - started)
    num_bytes = sum(t.numel() * t.element_size() for t in source.values())
    best = statistics.median(seconds[1:])
    return {
        "benchmark": "weight_sync",
        "transport": "plain copy",
        "device": device,
        "gigabytes": round(num_bytes / 1e9, 3),
        "copy_s": round(best, 4),
        "copy_gb_s": round(num_bytes / 1e9 / best, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cuda", action="store_true", help="weights on the GPU: cuda_ipc and shm")
    parser.add_argument("--transports", nargs="*", default=None)
    arguments = parser.parse_args()
    device = "cuda" if arguments.cuda else "cpu"
    names = arguments.transports or (("cuda_ipc", "shm") if arguments.cuda else CPU_TRANSPORTS)
    print(json.dumps(plain_copy(arguments.gigabytes, device, arguments.repeats)), flush=True)
    for name in names:
        for verify in ("full", "sampled"):
            report = measure(name, {"verify": verify}, arguments.gigabytes, device, arguments.repeats)
            print(json.dumps(report), flush=True)
    if not arguments.cuda and arguments.transports is None:
        report = measure("disk", {"delta": True}, arguments.gigabytes, device, arguments.repeats)
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
