"""Windows of samples, and the loop that an engine computes them in."""

from orchestrator.engine.api import MicroBatch, Window


def make_window(update, pieces, *, rate=None, first=0, first_number=0, **more):
    """Return a rank's window of the micro-batches `pieces`, each a (start, count) in the update.

    Args:
        rate: the learning rate, by default one that falls with the updates.
        first: the data set's index of the update's first sample.
        first_number: of the rank's micro-steps among all of the update.
        more: fields of `Window`; by default the rank has all samples.
    """
    micro_batches = tuple(
        MicroBatch(
            update=update,
            number=number,
            positions=range(start, start + count),
            indices=tuple(range(first + start, first + start + count)),
        )
        for number, (start, count) in enumerate(pieces, first_number)
    )
    rate = 0.1 / (1 + update) if rate is None else rate
    given = {
        "samples": sum(count for _, count in pieces),
        "steps": len(micro_batches),
        "micro_step_count": len(micro_batches),
        **more,
    }
    return Window(update=update, micro_batches=micro_batches, learning_rate=rate, **given)


def window_of(split, rank, update, **more):
    """Return the window of one rank of a split."""
    return make_window(
        update,
        split.pieces(rank),
        samples=split.samples,
        steps=split.micro_steps,
        samples_per_rank=split.samples_per_rank,
        micro_step_count=split.micro_step_count,
        first_number=split.first_numbers[rank],
        **more,
    )


def compute(engine, window, most=None):
    """Compute a window, or its first `most` micro-steps, without its boundary."""
    work = window.micro_batches[:most]
    engine.begin_window(window)
    for batch, micro_batch in zip(engine.batches(work), work, strict=True):
        engine.micro_step(batch, micro_batch)


def run(engine, windows, **boundary):
    """Compute windows as the training loop does; return the report of each boundary."""
    windows = list(windows)
    batches = engine.batches(m for window in windows for m in window.micro_batches)
    reports = []
    for window in windows:
        engine.begin_window(window)
        for micro_batch in window.micro_batches:
            engine.micro_step(next(batches), micro_batch)
        reports.append(engine.boundary(**boundary))
    return reports
