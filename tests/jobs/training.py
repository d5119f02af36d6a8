"""Train a job in threads, in one process: any number of ranks, any split."""

import copy

from orchestrator.engine.api import EngineSettings, MicroBatch, Window
from orchestrator.engine.torch import TorchEngine
from orchestrator.plan.split import split_leaves, split_window
from orchestrator.testing.threads import run_in_threads
from tests.engine.torch.test_engine import _run


def windows(rank, ranks, *, samples, updates, cap, leaves=False):
    """`updates` windows of one rank, over the data set from its start, again and again."""
    cut = split_leaves(samples, ranks, cap) if leaves else split_window(samples, ranks, cap=cap)
    for update in range(updates):
        pieces = tuple(
            MicroBatch(
                update=update,
                start=start,
                indices=tuple(range(update * samples + start, update * samples + start + count)),
            )
            for start, count in cut.pieces(rank)
        )
        yield Window(
            update=update, samples=samples, micro_batches=pieces, steps=cut.micro_steps,
            learning_rate=0.05, samples_per_rank=cut.samples_per_rank,
        )  # fmt: skip


def train(job, ranks, *, samples, updates, cap, leaves=False, **settings):
    """For each rank: (weights by name, reports, engine) after `updates` updates."""
    given = {"precision": "float64", "metric_names": job.metric_names, "leaf_size": cap, **settings}

    def be(group):
        # A job belongs to one rank: elsewhere each has a process of its own.
        engine = TorchEngine(copy.copy(job), EngineSettings(**given), group)
        mine = windows(group.rank, ranks, samples=samples, updates=updates, cap=cap, leaves=leaves)
        reports = _run(engine, mine)
        return {n: t.clone() for n, t in engine.model.state_dict().items()}, reports, engine

    return run_in_threads(ranks, be)
