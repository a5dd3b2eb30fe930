"""Differences: small where little changed, exact always, and damage is caught."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rill.errors import WeightSyncError
from rill.weights import delta
from rill.weights.delta import Codec
from tests.weights.scene import ends, publish, pulled, same, weights


def stepped(tensors: dict[str, Tensor], seed: int, names: int = 100) -> dict[str, Tensor]:
    """What an optimizer step makes of weights: all of the first `names` tensors move a little."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for k, (name, tensor) in enumerate(tensors.items()):
        noise = torch.randn(tensor.shape, generator=generator) * 1e-4
        moved[name] = (tensor.float() + noise).to(tensor.dtype) if k < names else tensor.clone()
    return moved


@settings(max_examples=40, deadline=None)
@given(
    words=st.integers(1, 200),
    width=st.sampled_from([1, 2, 4, 8]),
    codec=st.sampled_from(list(Codec)),
    changes=st.integers(0, 20),
    seed=st.integers(0, 99),
)
def test_a_difference_gives_back_the_new_bytes(
    words: int, width: int, codec: Codec, changes: int, seed: int
) -> None:
    if codec is Codec.ZSTD:
        pytest.importorskip("zstandard")
    rng = random.Random(seed)
    old = torch.tensor([rng.randrange(256) for _ in range(words * 8)], dtype=torch.uint8)
    new = old.clone()
    for _ in range(changes):
        new[rng.randrange(new.numel())] = rng.randrange(256)
    before = old.clone()
    payload = delta.encode(new, old, width=width, block_bytes=64, codec=codec)
    assert torch.equal(delta.decode(payload, old), new) and torch.equal(old, before)


def test_untouched_blocks_cost_next_to_nothing() -> None:
    old = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    new = old.clone()
    new[5] ^= 1
    assert len(delta.encode(new, old, width=2, block_bytes=4096, codec=Codec.ZLIB)) < 200


@pytest.mark.parametrize("name", ["disk", "tcp"])
def test_versions_travel_as_differences_between_whole_ones(name: str) -> None:
    with ends(name, delta=True, full_every=4) as (publisher, receiver):
        state, bases = weights(0, dtype=torch.bfloat16), []
        for version in range(10):
            manifest = publish(publisher, state, version)
            bases.append(manifest.base_version)
            assert same(pulled(receiver, manifest), state)
            state = stepped(state, version)
        assert bases == [None, 0, 1, 2, None, 4, 5, 6, None, 8]


@pytest.mark.parametrize("name", ["disk", "tcp"])
def test_a_receiver_that_missed_versions_walks_the_chain(name: str) -> None:
    with ends(name, delta=True, full_every=100) as (publisher, receiver):
        state = weights(0)
        manifests = []
        for version in range(6):
            manifests.append(publish(publisher, state, version))
            kept = state
            state = stepped(state, version)
        pulled(receiver, manifests[1])
        assert same(pulled(receiver, manifests[5]), kept) and receiver.version == 5


def test_a_new_receiver_starts_from_the_last_whole_version(tmp_path: Path) -> None:
    with ends("disk", delta=True, full_every=3, folder=str(tmp_path)) as (publisher, receiver):
        state = weights(0)
        for version in range(12):
            manifest = publish(publisher, state, version)
            kept = state
            state = stepped(state, version)
        assert manifest.base_version == 10
        assert same(pulled(receiver, manifest), kept)
        assert len(list(publisher.folder.glob("v*"))) <= 6, "old versions are removed"


def test_a_difference_is_smaller_than_the_weights(tmp_path: Path) -> None:
    big = {"w": torch.randn(1 << 18).to(torch.bfloat16)}
    frozen = {"frozen": torch.randn(1 << 18).to(torch.bfloat16)}
    with ends("disk", delta=True, folder=str(tmp_path), bucket_bytes=1 << 20) as (publisher, receiver):
        pulled(receiver, publish(publisher, {**big, **frozen}, 0))
        moved = {**stepped(big, 1), **frozen}
        assert same(pulled(receiver, publish(publisher, moved, 1)), moved)
        whole, difference = (
            sum(file.stat().st_size for file in sorted(publisher.folder.glob("v*"))[version].glob("bucket-*"))
            for version in (0, 1)
        )
    assert difference < 0.5 * whole, "half of it is frozen, and the other half's high bytes stay"


@pytest.mark.parametrize("name", ["disk"])
def test_a_damaged_or_cut_difference_is_caught(name: str, tmp_path: Path) -> None:
    rng = random.Random(1)
    with ends(name, delta=True, folder=str(tmp_path)) as (publisher, receiver):
        first = weights(0)
        pulled(receiver, publish(publisher, first, 0))
        manifest = publish(publisher, stepped(first, 1), 1)
        file = sorted(publisher.folder.glob("v*1/*.delta"))[0]
        whole = file.read_bytes()
        for _ in range(60):
            broken = bytearray(whole)
            broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
            file.write_bytes(broken)
            with pytest.raises(WeightSyncError):
                pulled(receiver, manifest)
        for length in (0, 5, 30, len(whole) - 1):
            file.write_bytes(whole[:length])
            with pytest.raises(WeightSyncError):
                pulled(receiver, manifest)
        file.write_bytes(whole)
        assert same(pulled(receiver, manifest), stepped(first, 1))


def test_a_change_of_layout_is_sent_whole() -> None:
    with ends("disk", delta=True) as (publisher, receiver):
        pulled(receiver, publish(publisher, weights(0), 0))
        fewer = dict(list(weights(1).items())[:5])
        manifest = publish(publisher, fewer, 1)
        assert manifest.base_version is None and same(pulled(receiver, manifest), fewer)


@pytest.mark.parametrize("name", ["disk", "tcp"])
def test_a_difference_is_never_to_a_version_that_could_not_be_written(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ends(name, delta=True) as (publisher, receiver):
        first = weights(0)
        pulled(receiver, publish(publisher, first, 0))
        with monkeypatch.context() as full, pytest.raises(OSError, match="no space"):
            full.setattr("rill.weights.disk.manifest_to_json", _no_space)
            publish(publisher, stepped(first, 1), 1)
        last = stepped(stepped(first, 1), 2)
        manifest = publish(publisher, last, 1)
        assert manifest.base_version == 0 and same(pulled(receiver, manifest), last)


def _no_space(_: object) -> str:
    raise OSError("no space left on device")
