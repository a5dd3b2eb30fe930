"""Workers of the runtime's tests that use torch."""

from __future__ import annotations

from typing import Any

import torch

from rill.runtime.worker import Worker


def tensors() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "bf16": torch.randn(300, 400, generator=generator).bfloat16(),
        "strided": torch.arange(200_000).reshape(400, 500)[::2, 3:77],
        "scalar": torch.tensor(2.5),
        "bool": torch.ones(100_000, dtype=torch.bool),
        "empty": torch.empty(0, 3),
        "ragged": [torch.full((n,), float(n)) for n in range(0, 3_000, 700)],
    }


class TensorPeer(Worker):
    def send_tensors(self) -> None:
        self.send(tensors(), self.group_name, 1)

    def receive_tensors(self) -> str:
        received, expected = self.recv(self.group_name, 0, timeout_s=20), tensors()
        torch.testing.assert_close(received, expected, rtol=0, atol=0)
        received["bf16"].zero_()
        return "equal"

    def all_reduce(self) -> list[float]:
        met = self.rendezvous(timeout_s=20)
        torch.distributed.init_process_group(
            "gloo", store=met.open_store(20.0), rank=met.rank, world_size=met.world_size
        )
        tensor = torch.full((3,), float(self.rank + 1))
        torch.distributed.all_reduce(tensor)
        torch.distributed.destroy_process_group()
        values: list[float] = tensor.tolist()
        return values

    def num_threads(self) -> int:
        return torch.get_num_threads()
