"""Buffers that differ between ranks are told of: they start alike, and checkpoints hold rank 0's.

To differ is no error: what a batch norm has seen, or a count of micro-steps, is each rank's own.
But who evaluates, saves, or goes on with a run has rank 0's, and a person should know.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch.nn import Module

from orchestrator.engine.torch.checks.at_start.same_machine import as_numbers, unlike_most
from orchestrator.engine.torch.checks.at_start.same_start import sha256_of
from orchestrator.engine.torch.comm.base_group import BaseGroup
from orchestrator.engine.torch.comm.gathered import numbers_of_all, texts_of_all
from orchestrator.plan.plan_warnings import named_ranks
from orchestrator.rundir.warnings import warn

MOST_NAMED = 3


class SameBuffers:
    """Compares a model's buffers over the ranks of `group`, which began with the same ones."""

    def __init__(self, model: Any, group: BaseGroup) -> None:
        self._group = group
        self._model = model if isinstance(model, Module) and list(model.buffers()) else None

    def look(self) -> None:
        """Warn, once, where buffers differ. Collective, for between windows."""
        if self._model is None or self._group.size == 1:
            return
        mine = [(name, sha256_of(buffer)) for name, buffer in self._model.named_buffers()]
        digest = hashlib.sha256(repr(mine).encode()).hexdigest()
        odd = unlike_most(numbers_of_all(self._group, as_numbers(digest)))
        if not odd:
            return
        told = [dict(json.loads(text)) for text in texts_of_all(self._group, json.dumps(mine))]
        names = [name for name in dict.fromkeys(n for one in told for n in one)
                 if len({one.get(name) for one in told}) > 1]  # fmt: skip
        self._model = None  # said once; all ranks come here together
        if self._group.rank == 0:
            warn(_sentence(names, odd))


def _sentence(names: list[str], odd: list[int]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return (
        f"{named_ranks(odd)} no longer {'have' if len(odd) > 1 else 'has'} the buffers of the "
        f"others: {', '.join(names[:MOST_NAMED])}{more}. Checkpoints hold rank 0's, and a run that "
        "is gone on with begins with those on every rank; where they take part in training, it "
        "does not end with the same bits. What forward() writes into a buffer has to be computed "
        "from what all ranks share (in after_update, say), or be of no consequence"
    )
