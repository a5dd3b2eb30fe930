"""Decode attention on Hopper, against torch: on a processor whose threads stand for the device's (emulated_tiles.h),
and on the GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rill.models.decode.attention_paged import LayerCache
from rill.models.decode.decode_work import MAX_PIECES, DecodeWork, Run, work_list
from rill.models.ops import cuda_decode
from tests.models.ops.test_cuda_product import described

Case = tuple[int, int, int, int, list[int], int | None]
CASES: dict[str, Case] = {
    # heads of queries and of keys, their width, tokens of a block, contexts, tokens of a piece
    "two heads at once, groups of six": (12, 2, 128, 16, [300, 1, 17, 128], None),
    "rows in pieces": (8, 4, 64, 32, [700, 40, 64, 65], 64),
    "an odd number of heads": (9, 3, 64, 16, [40, 250], 128),
    "one head": (7, 1, 128, 16, [90, 16], None),
}
NUM_QUICK = 3


class Problem:
    num_new: int | None = None

    def __init__(self, case: Case, device: str) -> None:
        heads, kv_heads, dim, block, self.lengths, piece = case
        self.heads, self.dim, self.scale, rows = heads, dim, dim**-0.5, len(self.lengths)
        generator = torch.Generator().manual_seed(0)

        def drawn(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(device, torch.bfloat16)

        per_row = -(-max(self.lengths) // block)
        num_blocks = rows * per_row + 1  # the first one is nobody's
        self.cache = LayerCache(*(drawn(num_blocks, block, kv_heads, dim) for _ in range(2)))
        order = torch.randperm(num_blocks - 1, generator=generator).int() + 1
        self.tables = order.view(rows, per_row).to(device)
        for row, length in enumerate(self.lengths):  # what is behind a context is whatever it is
            for held in self.cache:
                held[self.tables[row, length // block :].long()][:, length % block :] = float("nan")
        self.query = drawn(rows, (heads + 2 * kv_heads) * dim)
        rows_B = np.arange(rows, dtype=np.int32)
        entries = work_list(np.array(self.lengths, dtype=np.int32), rows_B, piece)
        empty = np.zeros((2, entries.shape[1]), dtype=np.int32)  # of a graph's list
        self.entries = torch.from_numpy(np.concatenate([entries, empty])).to(device)
        self.num_pieces = [int(entries[entries[:, 0] == row][0, 2]) for row in rows_B]
        self.out = torch.full((rows, heads, dim), float("nan"), dtype=torch.bfloat16, device=device)
        self.parts = torch.full((rows, heads, MAX_PIECES, dim), float("nan"), device=device)
        self.stats = torch.full((rows, heads, MAX_PIECES, 2), float("nan"), device=device)

    def attend(self) -> Tensor:
        """[B, H, D]."""
        run = Run(0, len(self.lengths), 0, len(self.entries))
        work = DecodeWork(self.entries, (run,), None, num_new=self.num_new)
        cuda_decode.decode(
            self.query,
            self.cache,
            self.tables,
            work,
            run,
            self.heads,
            self.out,
            self.parts,
            self.stats,
            self.scale,
        )
        found = self.out.float()
        for row, count in enumerate(self.num_pieces):
            if count > 1:
                tops, totals = self.stats[row, :, :count].unbind(-1)
                shares = (tops - tops.amax(-1, keepdim=True)).exp()
                sums = (shares[..., None] * self.parts[row, :, :count]).sum(1)
                found[row] = sums / (shares * totals).sum(-1, keepdim=True)
        return found

    def wanted(self) -> Tensor:
        found = []
        for row, length in enumerate(self.lengths):
            keys, values = (x[self.tables[row].long()].flatten(0, 1)[:length].float() for x in self.cache)
            queries = self.query[row, : self.heads * self.dim].view(keys.shape[1], -1, self.dim).float()
            shares = (torch.einsum("kgd,tkd->kgt", queries, keys) * self.scale).softmax(-1)
            found.append(torch.einsum("kgt,tkd->kgd", shares, values).flatten(0, 1))
        return torch.stack(found)

    def check(self, found: Tensor) -> None:
        wanted = self.wanted()
        assert float((found - wanted).norm() / wanted.norm()) < 0.006


@pytest.fixture
def emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], None]:
    """cuda_decode.decode() on the CPU: of numbers that the kernel before has yet to write."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, library = tmp_path / "decode.cpp", tmp_path / "decode.so"
    source.write_text(
        "".join(
            f'#include "{p}"\n'
            for p in (Path(__file__).with_name("emulated_tiles.h"), *cuda_decode.SOURCES[2:])
        )
        + 'extern "C" int emulate(const Decode* s, int x, int y, int z, int bytes, void* to, void* from, int size) {\n'
        "  grid_x = x, grid_y = y, kernel_before = [=] { memcpy(to, from, size); };\n"
        "  return launch(x * y * z, BLOCK_THREADS, CLUSTER_SIZE, bytes, 1, [&] { decode(*s); });\n}\n"
    )

    def use(late: Tensor) -> None:
        written = late.clone()
        late.fill_(float("nan"))

        def kernel_of(macros: tuple[tuple[str, int], ...]) -> Any:
            flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", *(f"-D{k}={v}" for k, v in macros)]
            subprocess.run([compiler, *flags, "-o", library, source], check=True, timeout=300)
            emulate = ctypes.CDLL(str(library)).emulate

            def launch(grid: tuple[int, int, int], num_threads: int, argument: cuda_decode.Decode) -> None:
                assert ctypes.sizeof(argument) == 320 and num_threads == 160
                copied = ctypes.c_void_p(late.data_ptr()), ctypes.c_void_p(written.data_ptr()), late.nbytes
                memory = cuda_decode.memory_bytes_of(dict(macros))
                hangs = emulate(ctypes.byref(argument), *grid, memory, *copied)
                assert not hangs, "its threads wait for each other"

            return SimpleNamespace(launch_early=launch)

        monkeypatch.setattr(cuda_decode, "_kernel", kernel_of)
        monkeypatch.setattr(cuda_decode, "tensor_map", described)
        monkeypatch.setattr(cuda_decode, "STAGES", 2)

    return use


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (i >= NUM_QUICK)) for i, n in enumerate(CASES)]
)
def test_threads_in_any_order_compute_what_torch_computes(
    name: str, emulated: Callable[[Tensor], None]
) -> None:
    problem = Problem(CASES[name], "cpu")
    emulated(problem.cache.keys)
    problem.check(problem.attend())


def test_what_may_be_new_is_read_when_the_kernel_before_has_ended(emulated: Callable[[Tensor], None]) -> None:
    problem = Problem(CASES["rows in pieces"], "cpu")
    problem.num_new = 20
    values = problem.cache.values.clone()
    emulated(problem.cache.values)  # all of them are to come
    for row, length in enumerate(problem.lengths):  # but those that are old are there
        for token in range(length - problem.num_new):
            block, offset = int(problem.tables[row, token // 32]), token % 32
            problem.cache.values[block, offset] = values[block, offset]
    problem.check(problem.attend())


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_device_computes_what_torch_computes(name: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not Hopper")
    torch.backends.cuda.matmul.allow_tf32 = False
    problem = Problem(CASES[name], "cuda")
    found = problem.attend()
    problem.check(found)
    for _ in range(20):  # a wait that is missing shows now and then
        assert torch.equal(problem.attend(), found), "the same bits each time"
