"""A digest of the reduced gradient: two runs that compute the same have the same, to the bit.

An element x at row r and column c of a flat buffer counts (a_r + b_c)·x modulo 2**64, where x are
its bits as a whole number, a_r is odd and b_c even. So a change of one element always changes the
digest, others do with probability 1 - 2**-64, and whole numbers add up to the same in any order.
Row and column sums are all that is computed of the elements: two passes at the speed of memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_COLUMNS = 4096
_MASK = 2**64 - 1


def gradient_digest(flats: Sequence[Tensor]) -> str:
    """Return the digest of flat buffers (without padding) as 16 hexadecimal digits. It depends on
    their bits alone, not on the number of ranks. Waits for their device.
    """
    sums = [term for flat in flats for term in _terms(flat.detach())]
    whole = 0
    # A factor for each place, so that buffers or parts cannot be exchanged.
    for place, term in enumerate(torch.stack(sums).tolist() if sums else ()):
        whole += term * (2 * place + 1)
    return f"{whole & _MASK:016x}"


def leaf_digest(flats: Sequence[Tensor], numbers: Sequence[float]) -> int:
    """Return a digest, below 2**64, of a micro-step's gradient and of its loss's numbers: total,
    weight and metrics.
    """
    text = f"{gradient_digest(flats)} {[number.hex() for number in numbers]}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _terms(flat: Tensor) -> list[Tensor]:
    """Return sums modulo 2**64 of a flat buffer's words of 64 bits."""
    per_word = 8 // flat.element_size()
    whole = flat.numel() // per_word * per_word
    words = flat[:whole].view(torch.int64)
    rows, rest = divmod(words.numel(), _COLUMNS)
    row_factors, column_factors = _factors(rows + 1, flat.device)
    body = words[: rows * _COLUMNS].view(rows, _COLUMNS)
    last = words[rows * _COLUMNS :]
    terms = [
        (body.sum(1) * row_factors[:rows]).sum(),
        (body.sum(0) * column_factors).sum(),
        (last * (column_factors[:rest] + row_factors[rows])).sum(),
    ]
    if whole < flat.numel():  # an odd float32 at the end
        terms.append(flat[whole:].view(torch.int32).to(torch.int64).sum())
    return terms


@lru_cache(maxsize=4)
def _factors(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return an odd factor for each row, and an even one for each column."""
    numbers = np.random.Philox(key=0).random_raw(_COLUMNS + rows) & np.uint64(_MASK - 1)
    factors = torch.from_numpy(numbers.view(np.int64)).to(device)
    return factors[_COLUMNS:] + 1, factors[:_COLUMNS]
