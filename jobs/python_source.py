"""Text on every machine: the source files of Python's own standard library, as bytes.

All ranks need the same Python version, or their texts differ.
"""

from __future__ import annotations

import sysconfig
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 8  # every eighth file is for evaluation only


@lru_cache(maxsize=2)
def _pieces(longest: int, held_out: bool) -> tuple[bytes, ...]:
    """Return paragraphs of the top-level modules, in order of their names, long ones cut."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    chosen = [f for n, f in enumerate(files) if (n % HELD_OUT == HELD_OUT - 1) is held_out]
    pieces: list[bytes] = []
    for file in chosen:
        for paragraph in file.read_bytes().split(b"\n\n"):
            text = paragraph.strip(b"\n") + b"\n\n"
            pieces += [text[at : at + longest] for at in range(0, len(text), longest)]
    return tuple(piece for piece in pieces if len(piece) > 8)


class Paragraphs:
    """Data set of `count` pieces of 9 to `longest` bytes, taken evenly from the library.

    Each is a uint8 tensor of shape (length,). Indexing repeats nothing and draws nothing at random.

    Attributes:
        lengths: of all pieces, in bytes.
    """

    def __init__(self, count: int, longest: int, *, held_out: bool = False) -> None:
        every = _pieces(longest, held_out)
        if not 1 <= count <= len(every):
            raise ValueError(
                f"the standard library gives {len(every)} pieces of at most {longest} bytes, but "
                f"{count} are asked for"
            )
        self._pieces = [every[place * len(every) // count] for place in range(count)]
        self.lengths = [len(piece) for piece in self._pieces]

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> Tensor:
        return torch.frombuffer(bytearray(self._pieces[index]), dtype=torch.uint8)
