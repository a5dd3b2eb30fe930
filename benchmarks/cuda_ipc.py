"""A GPU tensor between two processes on one GPU by CUDA IPC: checks the content and times the hand-over.

    python benchmarks/cuda_ipc.py [--gib 1.0] [--repeats 20]

Needs one NVIDIA GPU and torch; no Ray, no network. Prints one JSON line per way: by CUDA IPC, from the call of `send`
to a tensor of the receiver's own that is ready for use, and until `send` returns; and through host shared memory.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import torch

from rill.runtime.cluster import Cluster
from rill.runtime.context import current
from rill.runtime.worker import Worker

TARGET_MS = 2.0


class Sender(Worker):
    """Holds the tensor."""

    def __init__(self, num_bytes: int) -> None:
        generator = torch.Generator(device=self.device).manual_seed(0)
        self.tensor = torch.randint(
            0, 255, (num_bytes,), dtype=torch.uint8, device=self.device, generator=generator
        )

    def checksum(self) -> int:
        return int(self.tensor[:: 4096 + 1].long().sum().item())

    def send_many(self, repeats: int) -> list[float]:
        seconds = []
        for n in range(repeats):
            self.tensor[0] = n % 255
            torch.cuda.synchronize()
            self.recv("receiver", 0)  # the other end is ready
            started_s = time.monotonic()
            self.send({"step": n, "started_s": started_s, "tensor": self.tensor}, "receiver", 0)
            seconds.append(time.monotonic() - started_s)
        return seconds

    def send_by_host(self, repeats: int) -> None:
        for _ in range(repeats):
            self.recv("receiver", 0)
            self.send({"started_s": time.monotonic(), "tensor": self.tensor.cpu()}, "receiver", 0)

    def routes(self) -> dict[str, int]:
        return dict(current().transfer.routes)


class Receiver(Worker):
    """Takes it."""

    def __init__(self, num_bytes: int) -> None:
        self.mine = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def receive_many(self, repeats: int) -> dict[str, Any]:
        seconds = []
        tensor = None
        for n in range(repeats):
            tensor = None  # give the memory back to the allocator before the next one comes
            self.send("ready", "sender", 0)
            received = self.recv("sender", 0)
            torch.cuda.synchronize()
            seconds.append(time.monotonic() - received["started_s"])
            tensor = received["tensor"]
            assert received["step"] == n
            assert int(tensor[0].item()) == n % 255
        assert tensor is not None
        return {
            "seconds": seconds,
            "checksum": int(tensor[:: 4096 + 1].long().sum().item()),
            "device": str(tensor.device),
        }

    def receive_by_host(self, repeats: int) -> list[float]:
        seconds = []
        for _ in range(repeats):
            self.send("ready", "sender", 0)
            received = self.recv("sender", 0)
            self.mine.copy_(received["tensor"])
            torch.cuda.synchronize()
            seconds.append(time.monotonic() - received["started_s"])
        return seconds


def report(name: str, seconds: list[float], num_bytes: int) -> float:
    first_ms, later_ms = 1e3 * seconds[0], 1e3 * median(seconds[1:])
    rate = num_bytes / (later_ms / 1e3) / 1e9
    line = {
        "name": name,
        "first_ms": round(first_ms, 3),
        "later_ms": round(later_ms, 3),
        "GB/s": round(rate, 1),
    }
    print(json.dumps(line), flush=True)
    return later_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(json.dumps({"skipped": "needs a CUDA device"}))
        return
    num_bytes = int(args.gib * 2**30)
    with Cluster(devices="cuda:1") as cluster:
        sender = Sender.launch_async(cluster, name="sender", placement="0", num_bytes=num_bytes)
        receiver = Receiver.launch_async(cluster, name="receiver", placement="0", num_bytes=num_bytes)
        sender.ready(120)
        receiver.ready(120)
        sending = sender.send_many(args.repeats)
        received = receiver.receive_many(args.repeats).wait(120)[0]
        (sent,) = sending.wait(120)
        assert received["checksum"] == sender.checksum().wait(60)[0], "the tensor arrived changed"
        assert received["device"].startswith("cuda"), received["device"]
        assert sender.routes().wait(60)[0].get("cuda_ipc") == args.repeats, "it did not go by CUDA IPC"
        later_ms = report("cuda_ipc", received["seconds"], num_bytes)
        report("cuda_ipc, until send returns", sent, num_bytes)
        by_host_sending = sender.send_by_host(max(2, args.repeats // 5))
        by_host = receiver.receive_by_host(max(2, args.repeats // 5)).wait(120)[0]
        by_host_sending.wait(120)
        report("host_shared_memory", by_host, num_bytes)
        verdict = {
            "name": "target",
            "target_ms": TARGET_MS * args.gib,
            "met": later_ms <= TARGET_MS * args.gib,
        }
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
