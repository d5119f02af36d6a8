"""Evaluations by all ranks, as the trainer has them."""

from orchestrator.plan.held_out import cut_held_out, share_of


def evaluate_held_out(engine, group, data, size=4, before_piece=lambda number: None, **more):
    """Return the report of an evaluation of `data` in pieces of `size` samples, on each rank.

    Args:
        more: see `share_of`.
    """
    share = share_of(cut_held_out(data.lengths, size), group.rank, group.size, **more)
    batches = engine.held_out_batches(data, share.micro_batches())
    return engine.evaluate_held_out(data, share, batches, before_piece)
