"""Exact sums over held-out data, the same in all engines."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from orchestrator.data import HeldOutData
from orchestrator.engine.common.job_checks import warn_of_non_finite
from orchestrator.engine.common.trailer import BAD_WEIGHT, NARROW, Trailer
from orchestrator.errors import JobError
from orchestrator.plan.held_out import HeldOutPiece, HeldOutShare
from orchestrator.rundir.warnings import warn

_KEPT_ROWS = 256
"""Pieces whose numbers may stay on a device; more would take memory that the model may need."""


class HeldOutSums:
    """The sums of one rank's pieces of held-out data, by data set.

    Args:
        data: which data sets there are.
        metric_names: of the job, in the order of a row's numbers.
        to_floats: returns numbers, some of them tensors of one, as floats; waits for them.
    """

    def __init__(
        self,
        data: HeldOutData,
        metric_names: Sequence[str],
        to_floats: Callable[[Sequence[Any]], list[float]],
    ) -> None:
        self._data, self._names, self._to_floats = data, metric_names, to_floats
        self._trailers = [Trailer(len(metric_names)) for _ in data.names]
        self._pieces: list[HeldOutPiece] = []
        self._rows: list[Any] = []
        self._first_bad = [0.0, 0.0]  # start and samples of the first piece with an unusable weight

    def add_share(
        self,
        share: HeldOutShare,
        batches: Iterator[Any],
        before_piece: Callable[[int], None],
        compute: Callable[[HeldOutPiece, Any], Sequence[Any]],
    ) -> None:
        """Add all pieces of a share; `compute` returns the row of a piece from its batch."""
        counted = len(share.pieces) - share.padding
        for number, piece in enumerate(share.pieces):
            before_piece(number)
            with _evaluating(self._data, piece):
                row = compute(piece, next(batches))
            if number < counted:  # the others keep ranks of a copy in step
                self.add(piece, row)

    def add(self, piece: HeldOutPiece, row: Sequence[Any]) -> None:
        """Add weight, total and metrics of a piece."""
        self._pieces.append(piece)
        self._rows += row
        if len(self._pieces) == _KEPT_ROWS:
            self._read()

    def _read(self) -> None:
        """Add the rows that wait to the sums."""
        numbers, width = self._to_floats(self._rows), 2 + len(self._names)
        for index, piece in enumerate(self._pieces):
            row = numbers[index * width : (index + 1) * width]
            own, sums = Trailer.from_losses(row, len(self._names)), self._trailers[piece.data_set]
            sums.sums = [total + units for total, units in zip(sums.sums, own.sums, strict=True)]
            sums.flags = [count + flag for count, flag in zip(sums.flags, own.flags, strict=True)]
            if own.flags[BAD_WEIGHT] and not self._first_bad[1]:
                self._first_bad = [float(piece.start), float(piece.samples)]
        self._pieces.clear()
        self._rows.clear()

    def numbers(self, bits: int = NARROW) -> list[float]:
        """Return all sums as numbers that add up over ranks without rounding (see `Trailer`)."""
        self._read()
        return [number for trailer in self._trailers for number in trailer.numbers(bits)]

    def figures(
        self,
        numbers: Sequence[float],
        bits: int,
        gather: Callable[[Sequence[float]], list[list[float]]],
    ) -> dict[str, float]:
        """Return the figures of the `numbers` of all ranks, added up: the same on all ranks.
        Collective where a weight is unusable.

        The figures of a data set whose weight is 0 are NaN.

        Raises:
            JobError: a weight was negative or not finite.
        """
        data, size = self._data, len(numbers) // len(self._trailers)
        trailers = [
            Trailer.from_numbers(numbers[start : start + size], bits)
            for start in range(0, len(numbers), size)
        ]
        if any(trailer.flags[BAD_WEIGHT] for trailer in trailers):
            bad = [row for row in gather(self._first_bad) if row[1]]
            start, samples = map(int, min(bad))
            raise JobError(
                "Loss.weight was negative or not finite in the evaluation of "
                f"{data.describe(start, samples)}; it must be 0 or more"
            )
        figures: dict[str, float] = {}
        for number, trailer in enumerate(trailers):
            report = trailer.report(self._names)
            own = data.figures(number, report["loss"], report["metrics"])
            figures |= own
            named = data.describe(sum(data.lengths[:number]))
            if report["weight"]:
                warn_of_non_finite(own, named)
            else:
                warn(
                    f"the weights of {named} add up to 0 over all its samples (all tokens are "
                    "masked, say), so its figures are NaN: look at what Loss.weight counts",
                    kind=f"weight of {named}",
                )
        return figures


@contextmanager
def _evaluating(data: HeldOutData, piece: HeldOutPiece) -> Generator[None]:
    """Note in the traceback of an error of the job which samples it evaluated."""
    try:
        yield
    except Exception as error:
        where = data.describe(piece.start, piece.samples)
        error.add_note(f"in the evaluation of {where}")
        raise
