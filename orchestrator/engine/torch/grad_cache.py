"""Gradient caching: losses over the embeddings of a whole update (contrastive losses, say).

Each micro-step computes its embeddings without a graph. At the boundary the ranks gather all
embeddings, once; every rank computes the loss of all of them and its gradient with respect to its
own rows; it then runs each micro-batch again with the same random numbers and back-propagates that
gradient; and the parameters are reduced, once. So an update has two collectives whatever the number
of micro-steps, and holds the activations of one micro-batch (of the others, the inputs and the
embeddings). Sources: gradient caching, arXiv 2101.06983; BASIC, arXiv 2111.10050.

Every rank computes the same loss and uses its own slice of the gradient; gradients of parameters
are then *summed* over ranks, and the backward needs no collective. Parameters of the loss itself (a
temperature) would be counted R times: they get their gradient only where the sample at place 0 of
the update is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from orchestrator.engine.api import EngineSettings, MicroBatch, Window
from orchestrator.engine.common.seeds import derived_seed
from orchestrator.engine.torch.accumulator import Accumulator
from orchestrator.engine.torch.checks import checked_loss, mean_refusal
from orchestrator.engine.torch.loader import collate_of
from orchestrator.engine.torch.model import in_evaluation, kept_state, moved, seed_everything
from orchestrator.errors import JobError
from orchestrator.job import Loss, dataset_of

_TOLERANCE = 1e-2  # kernels may round differently the second time; other dropout differs far more


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a job's embeddings in rows: one block of columns for each tensor.

    Attributes:
        single: the job gives a tensor, not a tuple of them.
        shapes: of one sample's part of each tensor.
    """

    single: bool
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, embeddings: Any, samples: int) -> Layout:
        """Build the layout. Raises `JobError` unless each tensor has a row for each sample."""
        single = isinstance(embeddings, Tensor)
        tensors = (embeddings,) if single else tuple(embeddings)
        for tensor in tensors:
            description = (
                tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            )
            if not isinstance(tensor, Tensor) or tensor.shape[:1] != (samples,):
                raise JobError(
                    "embed() must give a tensor, or a tuple of tensors, with one row for each of "
                    f"the micro-batch's {samples} samples, but gives {description}"
                )
        return cls(single, tuple(t.shape[1:] for t in tensors), tuple(t.dtype for t in tensors))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of rows: float32, or float64 when the embeddings are."""
        return torch.float64 if torch.float64 in self.dtypes else torch.float32

    def pack(self, embeddings: Any) -> Tensor:
        """Pack tensors (samples, *) into rows (samples, columns)."""
        tensors = (embeddings,) if self.single else embeddings
        return torch.cat([t.reshape(len(t), -1).to(self.dtype) for t in tensors], dim=1)

    def unpack(self, rows: Tensor) -> Any:
        """Undo `pack`."""
        blocks = rows.split([shape.numel() for shape in self.shapes], dim=1)
        tensors = tuple(
            block.reshape(len(rows), *shape).to(dtype)
            for block, shape, dtype in zip(blocks, self.shapes, self.dtypes, strict=True)
        )
        return tensors[0] if self.single else tensors


class CoupledWindows:
    """One rank's windows of a job with a coupled loss; takes the place of plain micro-steps.

    Args:
        job: has `embed` and `loss_of_embeddings`.
        accumulator: takes the gradients; the engine begins and ends its windows.
    """

    def __init__(
        self,
        job: Any,
        model: Module,
        settings: EngineSettings,
        accumulator: Accumulator,
    ) -> None:
        self._job, self._model = job, model
        self._accumulator, self._group = accumulator, accumulator.group
        self._clock = accumulator.clock
        self._reproducible = settings.reduction == "reproducible"
        self._names, self._seed = tuple(settings.metric_names), settings.seed
        self._double = settings.precision == "float64"
        self._layout: Layout | None = None
        self._kept: list[tuple[Any, MicroBatch, Tensor]] = []  # batch, place and rows

    def begin(self) -> None:
        """Begin a window, from nothing."""
        self._kept.clear()

    def micro_step(self, batch: Any, micro_batch: MicroBatch) -> None:
        """Embed one micro-batch without a graph, and keep it for the boundary. Silent.

        Running statistics move at the boundary, when it is embedded again.
        """
        with self._clock.compute, torch.no_grad(), kept_state(self._model):
            _, rows = self._embed(batch, micro_batch)
        self._kept.append((batch, micro_batch, rows))

    def backward(self, window: Window) -> None:
        """Gather, compute the loss, send its gradient back through every micro-batch. Collective.

        Raises:
            JobError: the job's methods do not give what the contract says.
        """
        layout, own_rows = self._own_rows()
        with self._clock.wait:
            rows = self._group.all_gather(own_rows, window.samples_per_rank or None, in_window=True)
            if window.order is not None:  # the loss sees samples in the order of positions
                rows = torch.empty_like(rows).index_copy_(
                    0, torch.tensor(window.order, device=rows.device), rows
                )
        with self._clock.compute:
            # The rows are the leaves of this graph: it ends where the embeddings begin.
            loss, gradient = self._loss(layout, rows.requires_grad_(), window)
        for number, (batch, micro_batch, before) in enumerate(self._kept, start=1):
            with self._clock.compute:
                _, again = self._embed(batch, micro_batch)
                if bool((again.detach() - before).abs().max() > _TOLERANCE * before.abs().max()):
                    raise JobError(
                        "embed() gave other embeddings when the same micro-batch was run again: it "
                        "may draw random numbers from torch's, NumPy's and Python's own generators "
                        "only, and must not change the model"
                    )
                # 0, with a graph that sends this micro-batch's part of `gradient` back.
                part = gradient[list(micro_batch.positions)]
                total = ((again - again.detach()) * part).sum()
            step = Loss(total, 0.0, dict.fromkeys(self._names, 0.0))
            # Once in all: every rank has computed the same loss.
            if micro_batch.start == 0:
                step = Loss(loss.total + total, loss.weight, loss.metrics)
            leaf = micro_batch.number if self._reproducible else None
            self._accumulator.backward(step, last=number == len(self._kept), leaf=leaf)
        self._kept.clear()

    def _embed(self, batch: Any, micro_batch: MicroBatch) -> tuple[Layout, Tensor]:
        """Return a micro-batch's embeddings as rows, and their layout."""
        # By the micro-batch, so the second run draws what the first one drew.
        seed_everything(derived_seed("step", self._seed, micro_batch.update, micro_batch.start))
        batch = moved(batch, self._group.device, double=self._double)
        with self._accumulator.precision.forward():
            embeddings = self._job.embed(self._model, batch)
        layout = Layout.of(embeddings, len(micro_batch.indices))
        if self._layout not in (None, layout):
            raise JobError(f"embed() gave {self._layout} before, and now {layout}")
        self._layout = layout
        return layout, layout.pack(embeddings)

    def _own_rows(self) -> tuple[Layout, Tensor]:
        """Return this rank's rows; none, of the right width, on a rank without samples."""
        if self._layout is None:
            with torch.no_grad(), in_evaluation(self._model):  # one sample has no variance
                sample = collate_of(self._job)([dataset_of(self._job)[0]])
                self._layout, _ = self._embed(
                    sample, MicroBatch(update=0, positions=(0,), indices=(0,))
                )
        if self._kept:
            return self._layout, torch.cat([rows for _, _, rows in self._kept])
        columns = sum(shape.numel() for shape in self._layout.shapes)
        empty = torch.empty((0, columns), dtype=self._layout.dtype, device=self._group.device)
        return self._layout, empty

    def _loss(self, layout: Layout, rows: Tensor, window: Window) -> tuple[Loss, Tensor]:
        """Return the loss of all samples, and its gradient with respect to their rows."""
        # The same on all ranks, which compute the same loss.
        seed_everything(derived_seed("loss", self._seed, window.update))
        with self._accumulator.precision.forward():
            loss = self._job.loss_of_embeddings(self._model, layout.unpack(rows))
        checked_loss(loss, self._names)
        if refusal := mean_refusal(loss):
            raise JobError(refusal)
        scale = self._accumulator.precision.scale
        # The graph is needed once more where the loss's own parameters get their gradient.
        keep = any(micro_batch.start == 0 for _, micro_batch, _ in self._kept)
        gradient: Any = torch.autograd.grad(
            # scaled: a float16 gradient would underflow
            loss.total * scale,
            rows,
            retain_graph=keep,
            allow_unused=True,
        )[0]
        if gradient is None:
            raise JobError("Loss.total of loss_of_embeddings() does not depend on the embeddings")
        return loss, gradient / scale
