"""A 64-bit checksum of a byte buffer at the speed of memory, on whatever device the buffer lies.

The buffer is read as a grid of 64-bit words, X[r, c]. With pseudo-random odd weights a and b,

    checksum = mix( Σ_c a_c · Σ_r X[r, c]  +  mix( Σ_r b_r · Σ_c X[r, c] )  +  length )        modulo 2^64

Any change confined to one word is always seen (an odd weight is invertible), and so is any pair of words that
changed places, unless both sums happen to meet (2^-64 for unrelated data). This guards against lost,
swapped, stale and damaged bytes; it is not a signature against an adversary.

On a GPU the sums run there, and `start_checksum` returns before they are done: whoever has many buffers starts all of
them before reading the first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

COLUMNS = 1_024
CACHED_ROWS = 64
SAMPLE_WORDS = 8 * 1_024
MASK = (1 << 64) - 1


def checksum(buffer_B: Tensor) -> int:
    """Of every byte. B byte; the buffer is contiguous uint8 and a multiple of 8 long."""
    return start_checksum(buffer_B)()


def start_checksum(buffer_B: Tensor) -> Callable[[], int]:
    """checksum(), begun; the call that it returns waits for the number."""
    words = _words(buffer_B)
    num_rows, num_rest = divmod(words.numel(), COLUMNS)
    rows = torch.empty(num_rows + 1, dtype=torch.int64, device=words.device)
    columns = torch.zeros(COLUMNS, dtype=torch.int64, device=words.device)
    # On a CPU both sums of a stretch are taken while it lies in the cache: memory is read once, not twice.
    stretch = CACHED_ROWS if words.device.type == "cpu" else max(num_rows, 1)
    for start in range(0, num_rows, stretch):
        end = min(start + stretch, num_rows)
        grid = words[start * COLUMNS : end * COLUMNS].view(end - start, COLUMNS)
        torch.sum(grid, dim=1, out=rows[start:end])
        columns += grid.sum(dim=0)
    rest = words[num_rows * COLUMNS :]
    if num_rest:
        columns[:num_rest] += rest
    rows[num_rows] = rest.sum()
    by_column = (columns * _odd_weights(COLUMNS, 1, words.device)).sum()
    by_row = (rows * _odd_weights(num_rows + 1, 2, words.device)).sum()
    both, num_bytes = torch.stack([by_column, by_row]), buffer_B.numel()  # one device wait, not two

    def value() -> int:
        across, down = (int(v) for v in both.tolist())
        return _mix(across + _mix(down) + num_bytes)

    return value


def sampled_checksum(buffer_B: Tensor, salt: int) -> int:
    """Of about 8,000 words at equal distances, beginning elsewhere for each salt (the version)."""
    return start_sampled_checksum(buffer_B, salt)()


def start_sampled_checksum(buffer_B: Tensor, salt: int) -> Callable[[], int]:
    words, num_bytes = _words(buffer_B), buffer_B.numel()
    stride = max(1, words.numel() // SAMPLE_WORDS)
    sample = words[_mix(salt) % stride :: stride]
    total = (sample * _odd_weights(sample.numel(), 3, words.device)).sum()
    return lambda: _mix(int(total.item()) + num_bytes)


def _words(buffer_B: Tensor) -> Tensor:
    assert buffer_B.dtype is torch.uint8 and buffer_B.is_contiguous(), "checksums are over contiguous bytes"
    assert buffer_B.numel() % 8 == 0, "buffers are padded to 8 bytes"
    return buffer_B.view(torch.int64)


_WEIGHTS: dict[tuple[int, torch.device], Tensor] = {}


def _odd_weights(count: int, salt: int, device: torch.device) -> Tensor:
    """Pseudo-random odd numbers; a longer request extends the same sequence."""
    known = _WEIGHTS.get((salt, device))
    if known is None or known.numel() < count:
        size = max(COLUMNS, 1 << (count - 1).bit_length())
        x = torch.arange(1, size + 1, dtype=torch.int64, device=device) * -7046029254386353131 + salt
        x = (x ^ (x >> 29)) * -4658895280553007687
        known = ((x ^ (x >> 32)) * -7723592293110705685) | 1
        _WEIGHTS[salt, device] = known
    return known[:count]


def _mix(value: int) -> int:
    """The finaliser of splitmix64."""
    value &= MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)
