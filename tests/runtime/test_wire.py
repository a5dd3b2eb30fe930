"""The wire format: what goes in comes out, without copies where none are needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rill.errors import UnpicklableError
from rill.runtime.transfer.wire import RAW_MIN_BYTES, decode, encode


def copy_through(obj: Any) -> Any:
    """`obj` as it would arrive at another process."""
    encoded = encode(obj)
    return decode(encoded.header, [bytearray(buffer) for buffer in encoded.buffers])


@dataclass
class Sample:
    tokens: np.ndarray
    extra: dict[str, Any]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64],
)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (70, 80)])
def test_tensors_of_any_type_and_shape_come_out_equal(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 4).to(dtype)
    arrived = copy_through(tensor)
    assert arrived.dtype == dtype
    assert arrived.shape == tensor.shape
    assert torch.equal(arrived, tensor)


def test_large_buffers_leave_the_header_as_views_of_the_callers_memory() -> None:
    array, tensor, data = np.zeros(10_000), torch.zeros(10_000), b"some"
    encoded = encode({"a": array, "t": tensor, "b": data})
    assert len(encoded.header) < 1_000
    assert sorted(buffer.nbytes for buffer in encoded.buffers) == [40_000, 80_000]
    array[0], tensor[1] = 7.0, 9.0  # seen through the views: nothing was copied
    arrived = decode(encoded.header, encoded.buffers)
    assert (arrived["a"][0], arrived["t"][1], arrived["b"]) == (7.0, 9.0, data)


def test_decoded_tensors_share_writable_buffers_and_copy_read_only_ones() -> None:
    encoded = encode(torch.zeros(10_000))
    memory = bytearray(encoded.buffers[0])
    shared = decode(encoded.header, [memory])
    shared[0] = 1.0
    assert memory[:4] == np.float32(1.0).tobytes()
    alone = decode(encoded.header, [bytes(memory)])
    alone[0] = 2.0
    assert memory[:4] == np.float32(1.0).tobytes()


def test_small_buffers_stay_in_the_header() -> None:
    encoded = encode([np.zeros(RAW_MIN_BYTES // 8 - 1), torch.zeros(3), b"short"])
    assert encoded.buffers == []
    assert encoded.num_bytes == len(encoded.header)


def test_only_the_elements_of_a_slice_travel() -> None:
    whole = torch.arange(1_000_000, dtype=torch.float32).reshape(1000, 1000)
    encoded = encode([whole[::2, 10:20], whole.t()[:5]])
    assert sum(buffer.nbytes for buffer in encoded.buffers) == 4 * (500 * 10 + 5 * 1000)
    first, second = decode(encoded.header, [bytearray(buffer) for buffer in encoded.buffers])
    assert torch.equal(first, whole[::2, 10:20])
    assert torch.equal(second, whole.t()[:5])


def test_gradients_stay_behind_and_parameters_stay_parameters() -> None:
    leaf = torch.ones(5, requires_grad=True)
    parameter = torch.nn.Parameter(torch.ones(2_000))
    arrived = copy_through({"computed": leaf * 2, "leaf": leaf, "parameter": parameter})
    assert not arrived["computed"].requires_grad
    assert not arrived["leaf"].requires_grad
    assert isinstance(arrived["parameter"], torch.nn.Parameter)
    assert arrived["parameter"].requires_grad


def test_the_same_object_twice_arrives_as_one() -> None:
    tensor = torch.zeros(5_000)
    first, second = copy_through([tensor, tensor])
    assert first is second


def test_dataclasses_and_ragged_lists_keep_their_structure() -> None:
    sample = Sample(
        np.arange(3_000), {"ragged": [torch.full((n,), n) for n in (0, 1, 3_000)], "text": "é" * 90_000}
    )
    arrived = copy_through(sample)
    np.testing.assert_array_equal(arrived.tokens, sample.tokens)
    assert [tensor.numel() for tensor in arrived.extra["ragged"]] == [0, 1, 3_000]
    assert arrived.extra["text"] == sample.extra["text"]


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, {"f": lambda: None}]}, r"object\['a'\]\[1\]\['f'\]"),
        (Sample(np.zeros(1), {"lock": __import__("threading").Lock()}), r"object\.extra\['lock'\]"),
    ],
)
def test_what_cannot_travel_is_named_by_its_path(value: object, path: str) -> None:
    with pytest.raises(UnpicklableError, match=path):
        encode(value)


_TEXT = st.text(alphabet="a é€\0😀", max_size=20)  # Hypothesis takes seconds to learn of all the others
_LEAVES = st.one_of(
    st.none(),
    st.integers(),
    st.floats(allow_nan=False),
    _TEXT,
    st.integers(0, 20_000).map(bytes),
    st.integers(0, 20_000).map(lambda n: "é" * (n // 2)),
    st.integers(0, 20_000).map(bytearray),
)


@settings(max_examples=25, deadline=None)
@given(st.recursive(_LEAVES, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(_TEXT, inner)))
def test_any_nesting_of_plain_values_comes_out_equal(value: object) -> None:
    assert copy_through(value) == value
