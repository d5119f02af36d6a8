"""State that one rank sends to all others: to ranks that are behind, or for an evaluation."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from orchestrator.engine.common.packing import unpack
from orchestrator.engine.common.replicas import folded
from orchestrator.engine.torch.buffers import is_expanded
from orchestrator.engine.torch.consistency_checks import digest_of
from orchestrator.engine.torch.group import (
    BaseGroup,
    broadcast_tensors,
    gather_numbers,
    gather_texts,
)
from orchestrator.engine.torch.model import is_opaque, kept_state
from orchestrator.engine.torch.state import pack


def send_state(
    group: BaseGroup, source: int, text: str, state: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Return text and state of rank `source` on every rank. Collective."""
    tensors: dict[str, Tensor] = {}
    message = "{}"
    if group.rank == source:
        packed = pack(state, tensors, "")
        kinds = [
            [n, str(t.dtype).removeprefix("torch."), list(t.shape), t.is_cpu]
            for n, t in tensors.items()
        ]
        message = json.dumps({"text": text, "state": packed, "kinds": kinds})
    content = json.loads(gather_texts(group, message)[source])
    for name, dtype, shape, on_cpu in content["kinds"]:
        if name not in tensors:
            tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=group.device)
        broadcast_tensors(group, [tensors[name].to(group.device)], source)
        if on_cpu:  # as an optimizer's counts of steps, which it reads once a parameter
            tensors[name] = tensors[name].cpu()
    return content["text"], unpack(content["state"], tensors)


# ------------------------------------------------------------------ Buffers
# Batch norms' statistics are each rank's own. A checkpoint holds those of rank 0. Shapes may differ
# as well: those of caches that forwards let grow.


def take_buffers(group: BaseGroup, model: Module, buffers: Mapping[str, Tensor]) -> None:
    """Replace buffers of the model by rank 0's. Collective.

    Args:
        buffers: the present ones, by name; the same names on all ranks.
    """
    _, received = send_state(group, 0, "", dict(buffers))
    for name, value in received.items():
        path, _, own_name = name.rpartition(".")
        layer = model.get_submodule(path)
        own_buffer = getattr(layer, own_name)
        # In place where possible: other code may hold the tensor.
        if own_buffer.shape == value.shape and not is_expanded(own_buffer):
            own_buffer.detach().copy_(value)
        else:
            setattr(layer, own_name, value)


@contextmanager
def buffers_of_writer(group: BaseGroup, model: Module, names: Sequence[str]) -> Generator[None]:
    """Within it, all ranks have rank 0's buffers; each gets its own back afterwards, also where a
    forward within changes them. Collective, on entry.

    Args:
        names: of the buffers that the model was built with, the same on all ranks. A forward may
            have registered others on some ranks alone.
    """
    with kept_state(model):
        all_buffers = dict(model.named_buffers())
        buffers = {name: all_buffers[name] for name in names if not is_opaque(all_buffers[name])}
        if buffers and group.size > 1:
            # One number for all of them first: where it is equal, nothing more is sent.
            digests = [digest_of(buffer) for buffer in buffers.values()]
            rows = gather_numbers(group, [float(folded(digests))])
            if any(row != rows[0] for row in rows):
                # Large constants, such as masks, are equal on all ranks and need not travel.
                rows = gather_numbers(group, [float(folded([digest])) for digest in digests])
                differ = [len(set(column)) > 1 for column in zip(*rows, strict=True)]
                pairs = zip(buffers.items(), differ, strict=True)
                take_buffers(group, model, dict(item for item, differs in pairs if differs))
        yield
