"""Products of up to a few hundred rows on Hopper, against torch: how they are cut, the kernel on a processor whose
threads stand for the device's (emulated_tiles.h), and on the GPU."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rill.models.decode import hopper

SIZES = [
    (64, 64),
    (512, 1408),
    (896, 4864),
    (1536, 8960),
    (2560, 9728),
    (4096, 14336),
    (3584, 18944),
    (8192, 29568),
]
"""Hidden and inner, of many a model."""
SLOW = pytest.mark.slow


@pytest.mark.parametrize("num_sms", [132, 114, 78])
@pytest.mark.parametrize("rows", [1, 64, 65, 128, 129, 192, 200, 256, 512])
def test_a_cut_fits_a_block_and_leaves_no_part_without_work(rows: int, num_sms: int) -> None:
    for size, inner in SIZES:
        for num_out, num_in, is_gated in (
            (2 * inner, size, True),
            (size, inner, False),
            (3 * size, size, False),
        ):
            cut = hopper.cut_of(rows, num_out, num_in, num_sms, is_gated=is_gated)
            num_threads, num_tiles = 128 * cut.num_groups + 32, -(-num_out // cut.tile)
            assert cut.memory_bytes <= 227 << 10
            assert cut.num_stages >= 2
            assert 1 <= cut.num_parts <= num_in // hopper.STEP
            assert cut.tile % 8 == 0
            assert (cut.tile // 2 + 32) * num_threads <= 65536, "registers"
            assert not is_gated or num_out > 136 * num_sms or num_tiles <= num_sms, "one tile to each"
            blocks = num_tiles * cut.num_parts * -(-rows // (64 * cut.num_groups))
            assert is_gated or cut.num_parts == 1 or blocks <= num_sms, "parts that wait for others"


def wanted_of(x: Tensor, weight: Tensor, is_gelu: bool | None) -> Tensor:
    """Rounded where the kernel rounds."""
    y = x.float() @ weight.float().T
    if is_gelu is None:
        return y
    gate, up = y.bfloat16().float().chunk(2, 1)
    act = torch.nn.functional.gelu(gate, approximate="tanh") if is_gelu else torch.nn.functional.silu(gate)
    return (act.bfloat16().float() * up).bfloat16().float()


def check(found: Tensor, wanted: Tensor, is_gelu: bool | None) -> None:
    error = (found.float().sum(0) - wanted).abs().amax() / wanted.abs().amax()
    assert error <= (1e-4 if is_gelu is None else 0.02), float(error)  # gates may be rounded the other way


def described(tensor: Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> bytes:
    """As in emulated_tiles.h."""
    more = 3 - len(sizes)
    assert all(2 * stride % 16 == 0 for stride in strides) and max(box) <= 256
    return struct.pack(
        "P9i84x", tensor.data_ptr(), *sizes, *[1] * more, 1, *strides, *[0] * more, *box, *[1] * more
    )


@pytest.fixture
def emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor, int], None]:
    """hopper.product() on the CPU: of rows that the kernel before has yet to write, by so many multiprocessors."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, library = tmp_path / "product.cpp", tmp_path / "product.so"
    source.write_text(
        f'#include "{Path(__file__).with_name("emulated_tiles.h")}"\n#include "{hopper.SOURCES[-1]}"\n'
        'extern "C" int emulate(const Product* p, int x, int y, int z, int bytes, void* to, void* from, int size) {\n'
        "  grid_x = x, grid_y = y, kernel_before = [=] { memcpy(to, from, size); };\n"
        "  return launch(x * y * z, BLOCK_THREADS, CLUSTER_SIZE, bytes, 1, [&] { product(*p); });\n}\n"
    )

    def use(x: Tensor, num_sms: int) -> None:
        written = x.clone()
        x.fill_(float("nan"))

        def kernel_of(cut: hopper.ProductCut, is_gelu: bool) -> Any:
            macros = hopper.macros_of(cut, is_gelu).items()
            flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", *(f"-D{k}={v}" for k, v in macros)]
            subprocess.run([compiler, *flags, "-o", library, source], check=True, timeout=300)
            emulate = ctypes.CDLL(str(library)).emulate

            def launch(grid: tuple[int, int, int], num_threads: int, argument: hopper.Product) -> None:
                assert ctypes.sizeof(argument) == 320 and num_threads == 128 * cut.num_groups + 32
                rows = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(written.data_ptr()), x.nbytes
                hangs = emulate(ctypes.byref(argument), *grid, cut.memory_bytes, *rows)
                assert not hangs, "its threads wait for each other"

            return SimpleNamespace(launch_early=launch)

        monkeypatch.setattr(hopper, "_kernel", kernel_of)
        monkeypatch.setattr(hopper, "tensor_map", described)
        device = SimpleNamespace(multi_processor_count=num_sms)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)

    return use


@pytest.mark.parametrize(
    ("rows", "num_out", "num_in", "is_gelu", "num_sms", "num_stages"),
    [
        pytest.param(70, 92, 320, False, 4, 3, id="tiles of 24 gates, the last one past the end"),
        pytest.param(300, 148, 320, True, 5, 3, id="two blocks of rows, five tiles for three"),
        pytest.param(130, 100, 256, True, 5, 2, id="tiles of 20 gates, three groups", marks=SLOW),
        pytest.param(130, 100, 1600, None, 8, 4, id="two parts of different length, two blocks of rows", marks=SLOW),
        pytest.param(200, 64, 3136, None, 3, 3, id="three parts, four groups, the last of few rows"),
    ],
)  # fmt: skip
def test_threads_in_any_order_compute_what_torch_computes(
    rows: int, num_out: int, num_in: int, is_gelu: bool | None, num_sms: int, num_stages: int,
    emulated: Callable[[Tensor, int], None], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, num_in, generator=generator).bfloat16()
    sides = 1 if is_gelu is None else 2
    weight = (torch.randn(sides * num_out, num_in, generator=generator) * num_in**-0.5).bfloat16()
    wanted = wanted_of(x, weight, is_gelu)
    cut = hopper.cut_of(rows, len(weight), num_in, num_sms, is_gated=sides == 2)
    few = cut._replace(num_stages=num_stages)  # so that each is used again
    monkeypatch.setattr(hopper, "MEMORY_BYTES", few.memory_bytes)
    assert cut.num_stages > num_stages
    emulated(x, num_sms)
    check(hopper.product(x, weight, is_gelu=is_gelu), wanted, is_gelu)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [20, 65, 128, 200, 256, 300, 512])
@pytest.mark.parametrize(
    ("num_out", "num_in"), [(1536, 8960), (8960, 1536), (4864, 896), (1000, 192), (4, 64), (18944, 3584)]
)
def test_a_device_computes_what_torch_computes(rows: int, num_out: int, num_in: int) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not Hopper")
    torch.backends.cuda.matmul.allow_tf32 = False
    generator = torch.Generator("cuda").manual_seed(rows)
    weight = torch.randn(2 * num_out, num_in, generator=generator, device="cuda") * num_in**-0.5
    weight, x = weight.bfloat16(), torch.randn(rows, num_in, generator=generator, device="cuda").bfloat16()
    for is_gelu in (None, False, True):
        wanted = wanted_of(x, weight, is_gelu)
        found = hopper.product(x, weight, is_gelu=is_gelu)
        check(found, wanted, is_gelu)
        for _ in range(20):  # a wait that is missing shows now and then
            assert torch.equal(hopper.product(x, weight, is_gelu=is_gelu), found), "the same bits each time"
