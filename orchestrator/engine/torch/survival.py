"""An engine that continues in another group, even in the middle of a window (docs/surviving.md).

Weights and optimizer state change only in the optimizer's step, so a window that broke off left
them unchanged. State that a forward changes (batch norm statistics) and state that a boundary may
have changed before it broke off (the float16 loss scale) is restored to the start of the window.
The shard of an optimizer that is lost with its rank comes from the newest checkpoint (`StateLost`).

The engine of a new rank was built alone. It counts as behind all others and receives what ranks
that are behind receive, and the bucket order that the first ranks agreed on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orchestrator.engine.api import EngineSettings, Window, against
from orchestrator.engine.common.job_checks import Hyperparameters
from orchestrator.engine.torch.accumulator import Accumulator
from orchestrator.engine.torch.engine import TorchEngine
from orchestrator.engine.torch.group import BaseGroup, gather_numbers, gather_texts
from orchestrator.engine.torch.optimizers import hyperparameters_of
from orchestrator.engine.torch.start_checks import broadcast_tensors
from orchestrator.engine.torch.state import pack, unpack
from orchestrator.errors import ConfigError, StateLost
from orchestrator.job import Job


class SurvivingEngine(TorchEngine):
    """See `Survives`; the arguments are `TorchEngine`'s.

    Raises:
        ConfigError: the group's transport cannot leave a collective whose peers are gone, or the
            job calls collectives of its own.
    """

    def __init__(self, job: Job, settings: EngineSettings, group: BaseGroup) -> None:
        if refusal := against(job, group):
            raise ConfigError(refusal)
        super().__init__(job, settings, group)
        self._whole_state: dict[str, Any] | None = None  # the optimizer's, between two groups
        self._order: list[int] | None = None  # of buckets, as those who began together agreed
        self._scale_before: dict[str, float] = {}
        self._incomplete = False  # a part of it was lost, and what is kept is of no use
        self._before: dict[str, tuple[int, Tensor]] = {}  # buffers: their version, and a copy

    def begin_window(self, window: Window) -> None:
        self._scale_before = self.accumulator.precision.state()
        for name, buffer in self.model.named_buffers():
            version = buffer._version  # noqa: SLF001  # no public name
            if self._before.get(name, (-1,))[0] != version:
                self._before[name] = version, buffer.detach().clone()
        super().begin_window(window)

    def _undo(self) -> None:
        """Restore the state at the beginning of the window under way, if any."""
        if not self._in_window:
            return
        self.accumulator.precision.load(self._scale_before)
        self._in_window, self._window = False, None
        for name, buffer in self.model.named_buffers():
            version, copy = self._before[name]
            if buffer._version != version:  # noqa: SLF001  # no public name
                buffer.detach().copy_(copy)

    # ------------------------------------------------------------------ another group

    def newcomers_wait(self, waiting: bool) -> None:  # a plain setter
        self.accumulator.newcomers_wait = waiting

    def before_growth(self) -> None:
        if self.accumulator.options.shard_optimizer:
            self._taken.wait()
            self._whole_state = self.accumulator.optimizer_state_among(self._group)

    def catch_up(self, group: BaseGroup, updates: int, standing: str) -> str | None:
        self._undo()
        self._taken.wait()
        rows = gather_numbers(group, [updates, self._incomplete])
        if incomplete := [rank for rank, row in enumerate(rows) if row[1]]:
            self._incomplete = True  # who has it again must not give it to who has not
            raise StateLost(incomplete)
        applied = [int(row[0]) for row in rows]
        newest, behind = max(applied), updates < max(applied)
        sharded = self.accumulator.options.shard_optimizer
        try:
            whole = self._state_among(group) if sharded else None
        except StateLost:
            self._incomplete = True
            raise
        received = None
        if min(applied) != newest:
            source = applied.index(newest)
            state = self._state_to_send() if group.rank == source else {}
            said, found = self._receive_state(group, source, standing, state)
            if behind:
                self.model.load_state_dict(found["model"])
                if whole is None:
                    self.accumulator.load_optimizer_state(found["optimizer"])
                self.accumulator.precision.load(found["precision"])
                self._order = found["order"]
                received = said
        self._whole_state = whole  # now that the weights are those that it belongs to
        return received

    def _state_to_send(self) -> dict[str, Any]:
        """Return the state for ranks that are behind; without the state of a sharded optimizer."""
        order = self.accumulator.options.order
        state: dict[str, Any] = {
            "order": None if order is None else list(order),
            "model": dict(self.model.state_dict()),
            "precision": self.accumulator.precision.state(),
        }
        if not self.accumulator.options.shard_optimizer:
            state["optimizer"] = self.accumulator.optimizer_state()
        return state

    def _state_among(self, group: BaseGroup) -> dict[str, Any]:
        """Return all of a sharded optimizer's state, on every rank of `group`. Collective.

        Those that were on their way into a group have it already, where one more was lost then.
        """
        have = [bool(row[0]) for row in gather_numbers(group, [self._whole_state is not None])]
        if not any(have):
            return self.accumulator.optimizer_state_among(group)
        _, found = self._receive_state(group, have.index(True), "", self._whole_state or {})
        return self._whole_state or found

    def _receive_state(
        self, group: BaseGroup, source: int, words: str, state: dict[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """Send text and state of rank `source` to every rank. Collective."""
        tensors: dict[str, Tensor] = {}
        message = "{}"
        if group.rank == source:
            packed = pack(state, tensors, "")
            kinds = [
                [n, str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in tensors.items()
            ]
            message = json.dumps({"words": words, "state": packed, "kinds": kinds})
        content = json.loads(gather_texts(group, message)[source])
        received = dict(self._receive_tensors(group, source, tensors, content["kinds"]))
        return content["words"], unpack(content["state"], received)

    @staticmethod
    def _receive_tensors(
        group: BaseGroup, source: int, own: dict[str, Tensor], kinds: list[Any]
    ) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors of rank `source` one by one. Collective."""
        for name, dtype, shape in kinds:
            tensor = own.get(name)
            if tensor is None:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=group.device)
            broadcast_tensors(group, [tensor.to(group.device)], source)
            yield name, tensor

    def load_state(self, folder: Path, extra: Mapping[str, Any]) -> None:
        super().load_state(folder, extra)
        self._incomplete = False

    def regroup(self, group: BaseGroup) -> None:
        earlier, self._group = self.accumulator, group
        earlier.close()
        earlier.release_shard()
        if self._incomplete:  # a step may have come to some; all are to load a checkpoint's anyway
            broadcast_tensors(group, [parameter.detach() for parameter in self.model.parameters()])
        self._reset_rate(earlier)
        # Batch norms' statistics are each rank's own; all go on with the writer's, as at a resume.
        broadcast_tensors(group, [buffer for _, buffer in self.model.named_buffers()])
        options = earlier.options
        if self._order is not None:
            options = options.with_options({"order": self._order})
        self.accumulator = Accumulator(self.model, earlier.optimizer, group, options)
        self.accumulator.take_over(earlier)
        if self._whole_state is not None:
            self.accumulator.load_optimizer_state(self._whole_state)
            self._whole_state = None
        self._clock = self.accumulator.clock
        self._hyperparameters = Hyperparameters(hyperparameters_of(earlier.optimizer))
        self._gathered = None
        self._coupled = self._coupled_windows()

    def _reset_rate(self, accumulator: Accumulator) -> None:
        """Reset the rate: some ranks have begun the next window already, with its rate."""
        if base := accumulator.optimizer.defaults.get("lr"):
            accumulator.set_rate(float(base))
