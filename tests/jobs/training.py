"""Train a job in threads, in one process: any number of ranks, any split."""

import copy

from orchestrator.local_ranks.threads import run_in_threads
from orchestrator.plan.split import split_leaves, split_window
from tests.engine.torch.jobs import engine_of
from tests.engine.windows import run, window_of


def windows(rank, ranks, *, samples, updates, cap, leaves=False):
    """`updates` windows of one rank, over the data set from its start, again and again."""
    cut = split_leaves(samples, ranks, cap) if leaves else split_window(samples, ranks, cap=cap)
    for update in range(updates):
        yield window_of(cut, rank, update, rate=0.05, first=update * samples)


def train(job, ranks, *, samples, updates, cap, leaves=False, **settings):
    """For each rank: (weights by name, reports, engine) after `updates` updates."""
    given = {"precision": "float64", **settings}

    def be(group):
        # A job belongs to one rank: elsewhere each has a process of its own.
        engine = engine_of(copy.copy(job), group, **given)
        mine = windows(group.rank, ranks, samples=samples, updates=updates, cap=cap, leaves=leaves)
        reports = run(engine, mine)
        return {n: t.clone() for n, t in engine.model.state_dict().items()}, reports, engine

    return run_in_threads(ranks, be)
