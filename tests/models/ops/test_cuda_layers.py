"""All layers of a step in one launch, against the same in plain torch: on the GPU, and on a processor whose threads
stand for the device's (emulated_device.h), in several orders."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rill.errors import EngineError
from rill.inference.native.engine import NativeEngine
from rill.models.decode import one_launch
from rill.models.decode.attention_paged import PagedBatch
from rill.models.decode.decoder import Decoder
from rill.models.decode.one_launch import MAX_ROWS, SOURCES, LaunchShape, Step
from rill.models.loading import ModelConfig

CASES: dict[str, tuple[dict[str, Any], list[int], int, int]] = {
    # what the model has, lengths of the rows, rows of padding behind them, blocks where threads are emulated
    "one row by clusters": ({"has_head_norms": True, "kv_heads": 1}, [700], 0, 16),
    "rows by blocks": ({}, [40, 1, 700], 1, 8),
    "eight rows, four heads of keys": (
        {"size": 256, "inner": 320, "heads": 12, "kv_heads": 4}, [70, 33, 16, 17, 2, 3], 2, 8,
    ),
    "a row of more pieces than clusters": ({"kv_heads": 1}, [2900], 0, 20),
    "norms with an offset, gelu": (
        {"has_head_norms": True, "is_offset": True, "is_gelu": True, "has_bias": False}, [40, 1, 70], 0, 8,
    ),
    "wide heads, groups of six": (
        {"size": 384, "inner": 512, "heads": 6, "kv_heads": 1, "dim": 128}, [900, 33, 16, 17, 1000], 0, 20,
    ),
    "quarters of different width": (
        {"size": 896, "inner": 1216, "heads": 14, "num_layers": 1}, [600, 30], 0, 32,
    ),
}  # fmt: skip
NUM_QUICK = 2


class Model(NamedTuple):
    shape: LaunchShape
    layers: list[dict[str, Tensor | None]]
    keys: list[Tensor]
    values: list[Tensor]
    cos: Tensor
    sin: Tensor
    hidden: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor
    table_rows: Tensor
    tables: Tensor

    def clone(self) -> Model:
        return self._replace(
            keys=[k.clone() for k in self.keys],
            values=[v.clone() for v in self.values],
            hidden=self.hidden.clone(),
        )


def make_model(options: dict[str, Any], lengths: list[int], num_padding: int, device: str) -> Model:
    generator = torch.Generator().manual_seed(0)
    options = {"has_head_norms": False, "has_bias": True, "num_layers": 2} | options
    has_norms, has_bias, num_layers = (
        options.pop(key) for key in ("has_head_norms", "has_bias", "num_layers")
    )
    defaults = {
        "size": 128, "inner": 256, "heads": 4, "kv_heads": 2, "dim": 64, "cache_block": 16, "eps": 1e-6,
        "scale": 0.125, "is_offset": False, "is_gelu": False, "head_eps": 1e-6 if has_norms else None,
    }  # fmt: skip
    shape = LaunchShape(**(defaults | options))

    def drawn(*size: int, fan: int = 1) -> Tensor:
        return (torch.randn(*size, generator=generator) * fan**-0.5).to(device, torch.bfloat16)

    e, i, h, g, d = shape.size, shape.inner, shape.heads, shape.kv_heads, shape.dim
    layers: list[dict[str, Tensor | None]] = [
        {
            "qkv": drawn((h + 2 * g) * d, e, fan=e),
            "bias": drawn((h + 2 * g) * d) if has_bias else None,
            "out": drawn(e, h * d, fan=h * d),
            "gate_up": drawn(2 * i, e, fan=e),
            "down": drawn(e, i, fan=i),
            "norm": drawn(e),
            "mlp_norm": drawn(e),
            "query_norm": drawn(d) if has_norms else None,
            "key_norm": drawn(d) if has_norms else None,
        }
        for _ in range(num_layers)
    ]
    angles = torch.arange(max(lengths) + 1)[:, None] * (0.7 ** torch.arange(d // 2))[None]
    cos, sin = (torch.cat([t, t], -1).to(device, torch.bfloat16) for t in (angles.cos(), angles.sin()))
    block = shape.cache_block
    num_blocks = 1 + sum(-(-n // block) for n in lengths)  # the first one is nobody's
    order, at = torch.randperm(num_blocks - 1, generator=generator).int() + 1, 0
    tables = torch.zeros(len(lengths) + 1, -(-max(lengths) // block) + 1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        tables[row, : -(-length // block)] = order[at : at + -(-length // block)]
        at += -(-length // block)
    ends = [n - 1 for n in lengths] + [0] * num_padding
    slots = [int(tables[row, n // block]) * block + n % block for row, n in enumerate(ends[: len(lengths)])]
    rows = [*range(len(lengths)), *([len(lengths)] * num_padding)]

    def numbers(of: list[int]) -> Tensor:
        return torch.tensor(of, dtype=torch.int32, device=device)

    return Model(
        shape, layers,
        [drawn(num_blocks, block, g, d) for _ in layers], [drawn(num_blocks, block, g, d) for _ in layers],
        cos.contiguous(), sin.contiguous(), drawn(len(ends), e), numbers(ends),
        numbers(slots + [0] * num_padding), numbers([n + 1 for n in ends]), numbers(rows), tables.to(device),
    )  # fmt: skip


def in_torch(model: Model, num_rows: int) -> None:
    """Rounded where the kernel rounds."""
    shape, bf16 = model.shape, torch.bfloat16
    h, g, d = shape.heads, shape.kv_heads, shape.dim

    def normed(x: Tensor, weight: Tensor | None, is_offset: bool = False) -> Tensor:
        assert weight is not None
        y = x.float() * (1 / torch.sqrt(x.float().square().mean(-1, keepdim=True) + 1e-6))
        return (y * (1 + weight.float()) if is_offset else y.to(bf16).float() * weight.float()).to(bf16)

    def turned(x: Tensor) -> Tensor:
        cos, sin = (table[model.positions.long()][:, None].float() for table in (model.cos, model.sin))
        swapped = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1).float()
        return ((x.float() * cos).to(bf16).float() + (swapped * sin).to(bf16).float()).to(bf16)

    def product(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
        assert weight is not None
        y = x.float() @ weight.float().T
        return (y if bias is None else y + bias.float()).to(bf16)

    hidden = model.hidden
    for layer, keys, values in zip(model.layers, model.keys, model.values, strict=True):
        x = normed(hidden, layer["norm"], shape.is_offset)
        qkv = product(x, layer["qkv"], layer["bias"]).view(len(hidden), -1, d)
        query, key, value = qkv.split([h, g, g], 1)
        if shape.head_eps is not None:
            query, key = normed(query, layer["query_norm"]), normed(key, layer["key_norm"])
        query, key = turned(query), turned(key)
        out = torch.zeros(len(hidden), h, d, device=hidden.device)
        for row in range(num_rows):
            slot, length = int(model.slots[row]), int(model.lengths[row])
            held_keys, held_values = keys.view(-1, g, d), values.view(-1, g, d)
            held_keys[slot], held_values[slot] = key[row], value[row]
            tokens = torch.arange(length, device=hidden.device)
            at = model.tables[row][tokens // 16] * 16 + tokens % 16
            seen_keys, seen_values = held_keys[at].float(), held_values[at].float()
            for head in range(h):
                scores = seen_keys[:, head // (h // g)] @ query[row, head].float() * shape.scale
                out[row, head] = scores.softmax(0) @ seen_values[:, head // (h // g)]
        hidden += product(out.to(bf16).flatten(1), layer["out"])
        gate, up = (
            product(normed(hidden, layer["mlp_norm"], shape.is_offset), layer["gate_up"]).float().chunk(2, 1)
        )
        act = (
            torch.nn.functional.gelu(gate, approximate="tanh")
            if shape.is_gelu
            else torch.nn.functional.silu(gate)
        )
        hidden += product((act.to(bf16).float() * up).to(bf16), layer["down"])


def in_one_launch(model: Model, num_blocks: int, launch: Callable[[Step], None]) -> None:
    shape, device = model.shape, model.hidden.device
    pointers = [
        0 if tensor is None else tensor.data_ptr()
        for layer, keys, values in zip(model.layers, model.keys, model.values, strict=True)
        for tensor in (*layer.values(), model.cos, model.sin, keys, values)
    ]
    table = torch.tensor(pointers, dtype=torch.int64, device=device)
    nothing = torch.full((), float("nan"), device=device)
    group, num_pieces = shape.heads // shape.kv_heads, MAX_ROWS * shape.kv_heads + num_blocks
    scratch = [
        nothing.bfloat16().repeat(MAX_ROWS * (shape.heads + 2 * shape.kv_heads) * shape.dim),
        nothing.bfloat16().repeat(MAX_ROWS * shape.inner),
        nothing.repeat(num_pieces * group * shape.dim),
        nothing.repeat(num_pieces * group),
        torch.zeros(2, dtype=torch.int32, device=device),
    ]
    given = [table, *model[6:], *scratch]
    step = Step(
        *(tensor.data_ptr() for tensor in given), len(model.layers), len(model.hidden), model.tables.stride(0),
        shape.eps, shape.head_eps or 0.0, shape.scale,
    )  # fmt: skip
    launch(step)
    assert scratch[-1].tolist() == [0, 0], "counters are as they were"


def check(found: Model, wanted: Model, num_rows: int) -> None:
    def error(a: Tensor, b: Tensor) -> float:
        return float((a.double() - b.double()).norm() / b.double().norm())

    assert error(found.hidden[:num_rows], wanted.hidden[:num_rows]) < 0.02
    for a, b in zip((*found.keys, *found.values), (*wanted.keys, *wanted.values), strict=True):
        assert error(a, b) < 0.003, "the cache"


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, int]], Any]:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("emulator")

    def build(macros: dict[str, int]) -> Any:
        device = Path(__file__).with_name("emulated_device.h")
        source, library = folder / "layers.cpp", folder / f"layers{len(list(folder.iterdir()))}.so"
        source.write_text(
            "".join(f'#include "{path}"\n' for path in (device, *SOURCES[1:]))
            + 'extern "C" int emulate(const Step* s, int order) {\n'
            "  return launch(BLOCKS, BLOCK_THREADS, CLUSTER_SIZE, MEMORY_BYTES, order, [&] { layers(*s); });\n}\n"
        )
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", *(f"-D{k}={v}" for k, v in macros.items())]
        subprocess.run([compiler, *flags, "-o", library, source], check=True, timeout=300)
        return ctypes.CDLL(str(library))

    return build


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (i >= NUM_QUICK)) for i, n in enumerate(CASES)]
)
def test_threads_in_any_order_compute_what_torch_computes(
    name: str, emulator: Callable[[dict[str, int]], Any]
) -> None:
    options, lengths, num_padding, num_blocks = CASES[name]
    model = make_model(options, lengths, num_padding, "cpu")
    found, wanted = model.clone(), model.clone()
    in_torch(wanted, len(lengths))
    # As little room in the rings as there may be.
    emulate = emulator(model.shape.macros(num_blocks) | {"SLOTS": 2}).emulate

    def launch(step: Step) -> None:
        assert emulate(ctypes.byref(step), 1) == 0, "its threads wait for each other"

    in_one_launch(found, num_blocks, launch)
    check(found, wanted, len(lengths))


@pytest.mark.parametrize(
    ("num_slots", "num_rows"),
    [
        pytest.param(9, MAX_ROWS, id="all rows", marks=pytest.mark.slow),
        pytest.param(2, 2, id="an engine of two slots"),
    ],
)
def test_the_check_at_start_compares_as_many_rows_as_there_are(
    num_slots: int, num_rows: int, emulator: Callable[[dict[str, int]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {
        "model_type": "qwen2", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32,
        "num_key_value_heads": 1, "intermediate_size": 256, "max_position_embeddings": 64,
    }  # fmt: skip
    config = NativeEngine.Config(
        model=ModelConfig(shape=shape), dtype="bfloat16", max_num_seqs=num_slots, num_kv_blocks=12
    )
    engine = NativeEngine(config)
    decoder, cache = engine._runner.decoder, engine._runner.cache
    assert decoder is not None and cache[0].keys.dtype is torch.bfloat16
    seen, computes = [], True

    def kernel_of(_: str, __: str, macros: dict[str, int], **___: int) -> SimpleNamespace:
        emulate = emulator(macros).emulate

        def launch(num_blocks: int, num_threads: int, step: Step) -> None:
            assert not computes or emulate(ctypes.byref(step), 1) == 0
            seen.append(step.rows)

        return SimpleNamespace(launch=launch)

    compute = Decoder.__call__

    def on_a_processor(of: Decoder, ids: Tensor, positions: Tensor, batch: PagedBatch, held: Any) -> Tensor:
        """Whose kernels want other numbers than the device's, and tables of the batch's rows alone."""
        starts, tables = torch.arange(len(ids) + 1, dtype=torch.int32), batch.block_tables_BM[: len(ids)]
        batch = replace(
            batch,
            slots_N=batch.slots_N.long(),
            query_starts_B1=starts,
            block_tables_BM=tables,
            table_rows_B=None,
        )
        return compute(of, ids.long(), positions.long(), batch, held)

    monkeypatch.setattr(Decoder, "__call__", on_a_processor)
    monkeypatch.setattr(one_launch, "CudaKernel", kernel_of)
    monkeypatch.setattr(one_launch, "num_blocks_of", lambda _: 8)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    one = one_launch.OneLaunch.of(decoder, config.block_size, torch.device("cpu"))
    assert one is not None
    tables = torch.zeros(num_slots + 1, 4, dtype=torch.int32)
    one.check(tables, cache)
    assert seen == [num_rows] and not tables.any()
    computes = False
    with pytest.raises(EngineError, match="off what the decoder gives"):
        one.check(tables, cache)
    engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_device_computes_what_torch_computes(name: str) -> None:
    from rill.models.decode.one_launch import CLUSTER, MEMORY_BYTES, NUM_THREADS, num_blocks_of
    from rill.models.ops.cuda_driver import CudaKernel

    options, lengths, num_padding, _ = CASES[name]
    model = make_model(options, lengths, num_padding, "cuda")
    wanted = model.clone()
    in_torch(wanted, len(lengths))
    num_blocks = num_blocks_of(torch.device("cuda", 0))
    source = "".join(path.read_text() for path in SOURCES)
    kernel = CudaKernel(
        source, "layers", model.shape.macros(num_blocks), memory_bytes=MEMORY_BYTES, cluster=CLUSTER
    )
    first = None
    for _ in range(20):  # a wait that is missing shows now and then
        found = model.clone()
        in_one_launch(found, num_blocks, lambda step: kernel.launch(num_blocks, NUM_THREADS, step))
        check(found, wanted, len(lengths))
        first = first or found
        assert torch.equal(found.hidden, first.hidden), "the same bits each time"
