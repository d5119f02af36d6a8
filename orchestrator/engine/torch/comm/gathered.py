"""Texts and numbers of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from orchestrator.engine.torch.comm.base_group import BaseGroup


def texts_of_all(group: BaseGroup, text: str) -> list[str]:
    """Every rank's text, in the order of ranks. Collective."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(group.device)
    sizes: list[int] = group.all_gather(torch.tensor([len(data)], device=group.device)).tolist()
    parts = group.all_gather(data, sizes).cpu().split(sizes)
    return [bytes(part.tolist()).decode() for part in parts]


def numbers_of_all(group: BaseGroup, numbers: Sequence[float]) -> list[list[float]]:
    """Every rank's numbers (equally many on all), a row for each rank, as float64. Collective."""
    row = torch.tensor([list(numbers)], dtype=torch.float64, device=group.device)
    return group.all_gather(row).tolist()
