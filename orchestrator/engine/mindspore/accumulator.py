"""Accumulation by hand: a container like the parameters, a compiled micro-step, one flat reduction.

Usable without the rest of this package, from a loop of your own:

    accumulator = Accumulator(model, loss=lambda model, batch: (total, weight, {}), group=group)
    for batch in micro_batches:
        accumulator.add(batch)          # forward, backward, add up; nothing is sent
    sums = accumulator.reduce(trailer)  # collective
    accumulator.clear()

Gradients are *sums* over samples; dividing by the sum of weights is the boundary's (see `engine`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from orchestrator.engine.mindspore.bucket_layout import Layout, lay_out
from orchestrator.engine.mindspore.comm.process_group import MindSporeGroup
from orchestrator.engine.mindspore.model.compiling import Compiled
from orchestrator.engine.mindspore.model.losses import Sums
from orchestrator.engine.mindspore.model.precision import Precision
from orchestrator.engine.settings import EngineSettings
from orchestrator.errors import JobError

framework: Any = mindspore  # its annotations are not those of its behaviour
BLOCK = 4096
PLAIN_STEPS = 3


class Accumulator:
    """Sums of gradients over the micro-steps of a window.

    Args:
        model: the network; its trainable parameters are the ones accumulated.
        loss: (model, batch) -> (total, weight, metrics), all sums; compiled unless mode is
        pynative.
        group: who the sums are reduced with.
        settings: which metrics to keep, in order; how to compile (see `compiling`); the size of a
            bucket of the flat buffer (see `plan.wire.bucket_count`).
        reference: the same loss for PyNative mode: the first micro-batch's gradient is compared
            with its, because a graph may cut a gradient without a word. None skips that.
        precision: the format to compute in; the sums are those of the scaled losses.
        trailer_numbers: how many numbers ride along.
    """

    def __init__(
        self,
        model: nn.Cell,
        loss: Callable[[Any, Any], Sums],
        group: MindSporeGroup,
        settings: EngineSettings | None = None,
        *,
        reference: Callable[[Any, Any], Sums] | None = None,
        precision: Precision | None = None,
        trailer_numbers: int = 0,
    ) -> None:
        self.parameters: tuple[Parameter, ...] = tuple(model.trainable_params())
        if not self.parameters:
            raise JobError("the model has no trainable parameters")
        self.dtype: Any = self.parameters[0].dtype
        settings = settings or EngineSettings()
        self._model, self._group, self._names = model, group, tuple(settings.metric_names)
        self._loss, self._reference = loss, reference
        self._mode, self._jit_level = settings.mode, settings.jit_level
        self.precision = precision or Precision()
        self._sample: tuple[Any, Sequence[Tensor]] | None = None
        self.sums: tuple[Parameter, ...] = tuple(
            Parameter(ops.zeros_like(p), name=f"sum.{p.name}", requires_grad=False)
            for p in self.parameters
        )
        self.shapes = tuple(p.shape for p in self.parameters)
        self.alone = group.size == 1
        sizes = [int(p.size) for p in self.parameters] + [trailer_numbers] * bool(trailer_numbers)
        itemsize = int(self.parameters[0].itemsize)
        self.layout: Layout = lay_out(sizes, itemsize=itemsize, bucket_bytes=settings.bucket_bytes)
        self._steps: dict[Any, Compiled] = {}
        self._pack = self.compile(self._packing(), "the packing of gradients")
        self._clear = self.compile(self._clearing(), "the clearing of gradients")

    def compile(self, function: Callable[..., Any], what: str) -> Compiled:
        """Compile in this accumulator's mode."""
        return Compiled(function, mode=self._mode, jit_level=self._jit_level, what=what)

    @property
    def compile_s(self) -> float:
        """Seconds spent in first calls of compiled functions so far."""
        every = (*self._steps.values(), self._pack, self._clear)
        return sum(compiled.compile_s for compiled in every)

    # ------------------------------------------------------------------ micro-steps

    def add(self, batch: Any) -> Tensor:
        """Forward and backward of one micro-batch; its gradient is added up. Nothing is sent.

        Returns:
            A tensor [total, weight, *metrics], not waited for.
        """
        form, leaves = _flatten(batch)
        if form in self._steps:
            return self._steps[form](*leaves)
        what = f"the job's loss{_location(self._loss)}"
        step = self.compile(self._micro_step(self._gradients(self._loss, form)), what)
        self._steps[form] = step
        if self._reference is None or self._mode == "pynative":
            return step(*leaves)
        self._sample = self._sample or (form, leaves)
        before = [held.asnumpy().copy() for held in self.sums]
        wanted = self._plainly(form, leaves)  # first: it says better than a graph what is wrong
        result = step(*leaves)
        self._compare(wanted, before)
        return result

    def _gradients(self, loss: Callable[[Any, Any], Sums], form: Any) -> Callable[..., Any]:
        model, names, kind = self._model, self._names, form[0]
        keys = form[1:]

        def forward(*leaves: Tensor) -> Any:
            if kind == "tensor":
                total, weight, metrics = loss(model, leaves[0])
            elif kind == "tuple":
                total, weight, metrics = loss(model, leaves)
            else:
                total, weight, metrics = loss(model, dict(zip(keys, leaves)))  # noqa: B905  # no strict in graphs
            found: Any = ()
            for name in names:
                found = (*found, metrics[name])
            return total, weight, found

        objective = self.precision.objective(forward)
        return framework.value_and_grad(objective, None, self.parameters, has_aux=True)

    def _micro_step(self, gradients: Callable[..., Any]) -> Callable[..., Any]:
        sums = self.sums

        def micro_step(*leaves: Tensor) -> Tensor:
            (_, (total, weight, metrics)), parts = gradients(*leaves)
            for held, part in zip(sums, parts):  # noqa: B905  # no strict in graphs
                ops.assign_add(held, part)
            figures: Any = (total.reshape(()),)
            zero: Any = ops.zeros_like(figures[0])
            for figure in (weight, *metrics):
                if isinstance(figure, Tensor):
                    figures = (*figures, figure.astype(total.dtype).reshape(()))
                else:
                    figures = (*figures, zero + figure)
            # One output: each further one costs a graph's call about as much as the call itself.
            return ops.stack(figures)

        return micro_step

    def _compare(self, wanted: Sequence[Tensor], before: Sequence[Any]) -> None:
        """Raise `JobError` when what the graph just added is not the gradient of plain Python."""
        for parameter, held, old, own in zip(
            self.parameters, self.sums, before, wanted, strict=True
        ):
            x, y = held.asnumpy() - old, own.asnumpy()
            size = max(float(np.abs(y).max(initial=0.0)), 1e-12)
            if not (np.isfinite(x).all() and np.isfinite(y).all()):
                continue  # the boundary's to judge
            if float(np.abs(x - y).max(initial=0.0)) > self.precision.tolerance * size:
                raise JobError(
                    f"compiled, the gradient of {parameter.name} is not the one that plain Python "
                    f"gives: MindSpore's graph compiler cuts gradients at code that it leaves to "
                    f"Python (objects, numpy, .asnumpy() in loss or model); use tensor operations "
                    f"there, and call Loss in the job's own loss(); or engine.mode=pynative"
                )

    def _plainly(self, form: Any, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        """The gradient of a micro-batch without compilation, waited for."""
        reference = self._reference
        assert reference is not None  # noqa: S101  # the callers have looked
        framework.set_context(mode=framework.PYNATIVE_MODE)
        try:
            _, parts = self._gradients(reference, form)(*leaves)
            for part in parts:
                part.asnumpy()
        finally:
            if self._mode == "graph":
                framework.set_context(mode=framework.GRAPH_MODE)
        return parts

    def plain_step_s(self) -> float:
        """Seconds for forward and backward of the first micro-batch without compilation, once;
        0 where that cannot be told. Its sums are left alone.
        """
        if self._sample is None:
            return 0.0
        sample, self._sample = self._sample, None
        taken: list[float] = []
        for _ in range(PLAIN_STEPS):
            began = time.perf_counter()
            self._plainly(*sample)
            taken.append(time.perf_counter() - began)
        return min(taken)

    # ------------------------------------------------------------------ the boundary

    def _packing(self) -> Callable[..., Any]:
        sums, buckets = self.sums, self.layout.buckets

        def pack(*trailer: Tensor) -> tuple[Tensor, ...]:
            packed: Any = ()
            for bucket in buckets:
                parts: Any = ()
                for piece in bucket:
                    tensor = sums[piece.source] if piece.source < len(sums) else trailer[0]
                    whole = piece.stop - piece.start == tensor.size
                    flat = tensor.reshape(-1)
                    parts = (*parts, flat if whole else flat[piece.start : piece.stop])
                packed = (*packed, ops.concat(parts) if len(parts) > 1 else parts[0])
            return packed

        return pack

    def reduce(self, trailer: Sequence[float] = ()) -> list[Tensor]:
        """The buckets of gradients and trailer, summed over ranks. Collective: one a bucket.

        A lone rank has nothing to pack: its buckets are the sums themselves, and the trailer.
        """
        extra = [Tensor(np.asarray(trailer), self.dtype)] if len(trailer) else []
        if self._group.size == 1:
            return [*self.sums, *extra]
        return self._group.sums(list(self._pack(*extra)))

    def trailer_of(self, buckets: Sequence[Tensor]) -> list[float]:
        """The (summed) trailer's numbers."""
        if self._group.size == 1:
            return buckets[-1].asnumpy().tolist()
        parts = [buckets[b][start:stop].asnumpy() for b, start, stop in self.layout.found[-1]]
        return np.concatenate(parts).tolist()

    def norm_of(self, buckets: Sequence[Tensor]) -> float:
        """The 2-norm of all gradients in the buckets; on a CPU by NumPy, which is ten times as fast
        there as MindSpore's own sums.
        """
        spans = [(place, 0, int(bucket.size)) for place, bucket in enumerate(buckets)]
        if self._group.size == 1:
            spans = spans[: len(self.sums)]
        elif len(self.layout.sizes) > len(self.sums):
            cut = {b: start for b, start, _ in self.layout.found[-1]}
            spans = [(b, 0, cut.get(b, stop)) for b, _, stop in spans]
        squares = 0.0
        for place, start, stop in spans:
            if self._group.transport == "mccl":
                squares += _squares(buckets[place].asnumpy().reshape(-1)[start:stop])
            else:
                squares += float(ops.square(buckets[place].reshape(-1)[start:stop]).sum().asnumpy())
        return math.sqrt(squares)

    def _clearing(self) -> Callable[..., Any]:
        sums = self.sums

        def clear() -> bool:
            for held in sums:
                ops.assign(held, ops.zeros_like(held))
            return True

        return clear

    def clear(self) -> None:
        """Set all sums to zero."""
        self._clear()


def _squares(flat: Any) -> float:
    """The sum of squares: blocks in their own type, which are added up in float64."""
    blocks = (flat[place : place + BLOCK] for place in range(0, flat.size, BLOCK))
    return math.fsum(float(np.dot(block, block)) for block in blocks)


def _location(loss: Any) -> str:
    """Where a function stands, for messages."""
    code = getattr(getattr(loss, "__func__", loss), "__code__", None)
    return f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""


def _flatten(batch: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """A batch's form, and its tensors: graphs take tensors as inputs, and structures as
    constants.
    """
    if isinstance(batch, Tensor):
        return ("tensor",), (batch,)
    if isinstance(batch, tuple | list) and all(isinstance(leaf, Tensor) for leaf in batch):
        return ("tuple", len(batch)), tuple(batch)
    if isinstance(batch, Mapping) and all(isinstance(leaf, Tensor) for leaf in batch.values()):
        return ("mapping", *batch), tuple(batch.values())
    raise JobError(
        f"a batch must be a tensor, or a tuple or dictionary of tensors, but is "
        f"{type(batch).__name__}"
    )
