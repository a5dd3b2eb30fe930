"""Differences between two versions of a bucket: only the blocks that changed, XORed, by byte plane, compressed.

After an optimizer step most weights move by little: the high bytes of old XOR new are nearly all zero. Laying
equal bytes of all elements beside one another (planes) lets any compressor see that. Untouched blocks (frozen layers,
adapters, experts without tokens) cost one bit each.

    payload = header │ one bit per block │ compressed( planes( (new XOR old) of the changed blocks ) ) │ CRC-32
"""

from __future__ import annotations

import struct
import zlib
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rill.errors import MissingExtraError, WeightSyncError

HEADER = struct.Struct("<4sBBIQQ")  # magic, codec, plane width, block bytes, bucket bytes, compressed bytes
TAIL = struct.Struct("<I")  # CRC-32 of all before it
MAGIC = b"RDLT"
Bytes = npt.NDArray[np.uint8]


class Codec(StrEnum):
    ZLIB = "zlib"
    ZSTD = "zstd"


_CODEC_IDS = {Codec.ZLIB: 1, Codec.ZSTD: 2}


def encode(new_B: Tensor, old_B: Tensor, *, width: int, block_bytes: int, codec: Codec) -> bytes:
    """The difference that turns old into new. `width` is the element size in bytes."""
    new, old = _padded(new_B, block_bytes), _padded(old_B, block_bytes)
    blocks = np.bitwise_xor(new, old).reshape(-1, block_bytes)
    changed = blocks.view(np.uint64).any(axis=1)
    planes = np.ascontiguousarray(blocks[changed].reshape(-1, width).T)
    packed = _compress(planes.tobytes(), codec)
    header = HEADER.pack(MAGIC, _CODEC_IDS[codec], width, block_bytes, new_B.numel(), len(packed))
    payload = header + np.packbits(changed).tobytes() + packed
    return payload + TAIL.pack(zlib.crc32(payload))


def decode(payload: bytes | bytearray, old_B: Tensor) -> Tensor:
    """A new buffer; old_B is left as it is."""
    payload, tail = payload[: -TAIL.size], payload[-TAIL.size :]
    if len(payload) < HEADER.size or TAIL.unpack(tail)[0] != zlib.crc32(payload):
        raise WeightSyncError(f"a weight difference of {len(payload)} bytes is cut off or damaged")
    magic, codec_id, width, block_bytes, num_bytes, packed_bytes = HEADER.unpack_from(payload)
    codec = next((c for c, i in _CODEC_IDS.items() if i == codec_id), None)
    is_sound = magic == MAGIC and width > 0 and block_bytes > 0 and block_bytes % 8 == 0
    if not is_sound or codec is None or num_bytes != old_B.numel():
        raise WeightSyncError("a weight difference has a damaged head, or is of a bucket of another size")
    num_blocks = -(-num_bytes // block_bytes)
    bits_end = HEADER.size + -(-num_blocks // 8)
    if len(payload) != bits_end + packed_bytes:
        raise WeightSyncError(f"a weight difference has {len(payload)} bytes, not those that were written")
    bits = np.frombuffer(payload, dtype=np.uint8, count=bits_end - HEADER.size, offset=HEADER.size)
    changed = np.unpackbits(bits, count=num_blocks).astype(bool)
    plain = np.frombuffer(_expand(payload[bits_end:], codec), dtype=np.uint8)
    if plain.size != int(changed.sum()) * block_bytes:
        raise WeightSyncError("a weight difference does not hold the blocks that it lists")
    blocks = _padded(old_B, block_bytes).reshape(-1, block_bytes).copy()
    blocks[changed] ^= plain.reshape(width, -1).T.reshape(-1, block_bytes)
    return torch.from_numpy(blocks.reshape(-1)[:num_bytes])


def _padded(buffer_B: Tensor, block_bytes: int) -> Bytes:
    data: Bytes = buffer_B.cpu().numpy()
    rest = -data.size % block_bytes
    return np.concatenate([data, np.zeros(rest, dtype=np.uint8)]) if rest else data


def _compress(data: bytes, codec: Codec) -> bytes:
    if codec is Codec.ZLIB:
        return zlib.compress(data, level=1)
    return bytes(_zstandard().ZstdCompressor(level=1, threads=-1).compress(data))


def _expand(data: bytes | bytearray, codec: Codec) -> bytes:
    if codec is Codec.ZLIB:
        try:
            return zlib.decompress(data)
        except zlib.error as error:
            raise WeightSyncError(f"a weight difference cannot be expanded: {error}") from error
    zstandard = _zstandard()
    try:
        return bytes(zstandard.ZstdDecompressor().decompress(data))
    except zstandard.ZstdError as error:
        raise WeightSyncError(f"a weight difference cannot be expanded: {error}") from error


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtraError('codec "zstd" needs: pip install zstandard; "zlib" needs nothing') from error
    return zstandard
