"""An engine goes on in another group, with the state of whoever had gone farthest."""

import torch
from torch import nn

from orchestrator.engine.api import MicroBatch, Window
from orchestrator.engine.settings import EngineSettings
from orchestrator.engine.torch import run_in_threads
from orchestrator.engine.torch.surviving import SurvivingEngine
from orchestrator.plan.split import split_leaves
from tests.engine.torch.test_engine import Curve

SETTINGS = EngineSettings(
    optimizer={"name": "adam"}, reduction="reproducible", leaf_size=4, survive=True,
    metric_names=Curve.metric_names,
)  # fmt: skip


class Normed(Curve):
    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def window(update, rank, ranks, samples=28):
    split = split_leaves(samples, ranks, 4)
    return Window(
        update=update,
        samples=samples,
        micro_batches=tuple(
            MicroBatch(update=update, start=start, indices=tuple(range(start, start + count)))
            for start, count in split.pieces(rank)
        ),
        steps=split.micro_steps,
        learning_rate=0.01 / (update + 1),
        samples_per_rank=split.samples_per_rank,
    )


def train(engine, rank, ranks, updates, *, most=None):
    """Whole updates; with `most` only so many micro-steps of the last, and no boundary."""
    for update in updates:
        one = window(update, rank, ranks)
        engine.begin_window(one)
        work = one.micro_batches[:most]
        for batch, micro_batch in zip(engine.batches(work), work, strict=True):
            engine.micro_step(batch, micro_batch)
        if most is None:
            engine.boundary()


def digest(engine):
    return engine.weights_sha256()


def undisturbed(updates):
    def rank(group):
        engine = SurvivingEngine(Curve(), SETTINGS, group)
        train(engine, group.rank, group.size, range(updates))
        return digest(engine)

    return run_in_threads(4, rank)[0]


def survivors_of(ranks, left, before, job=Curve):
    """`before(engine, rank)` on all ranks; then those in `left` meet in a group of their own."""
    engines = {}

    def first(group):
        engine = engines[group.rank] = SurvivingEngine(job(), SETTINGS, group)
        before(engine, group.rank)

    run_in_threads(ranks, first)

    def then(group):
        engine, rank = engines[left[group.rank]], left[group.rank]
        done = 3 if rank in DONE else 2
        told = engine.catch_up(group, done, f"standing of {rank}")
        engine.regroup(group)
        done = 3 if DONE else 2
        train(engine, group.rank, group.size, range(done, 5))
        return told, digest(engine)

    return run_in_threads(len(left), then)


DONE = ()


def test_a_window_that_broke_off_is_redone_by_fewer_ranks_with_the_same_bits():
    def before(engine, rank):
        train(engine, rank, 4, range(2))
        train(engine, rank, 4, [2], most=1)

    found = survivors_of(4, (1, 3), before)
    assert found == [(None, undisturbed(5))] * 2


def test_who_had_not_ended_an_update_gets_it_from_one_who_had(monkeypatch):
    monkeypatch.setitem(globals(), "DONE", (2,))

    def before(engine, rank):
        train(engine, rank, 4, range(3))
        if rank in DONE:  # it has begun the next one
            train(engine, rank, 4, [3], most=1)

    # ranks 1 and 3 are as they were after 2 updates: the third never came to its end there
    states = {}

    def first(engine, rank):
        train(engine, rank, 4, range(2))
        states[rank] = [p.detach().clone() for p in engine.model.parameters()]
        optimizer = engine.accumulator.optimizer_state()
        kept = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in flat(optimizer)}
        train(engine, rank, 4, [2])
        if rank in DONE:
            train(engine, rank, 4, [3], most=1)
        else:
            with torch.no_grad():
                for p, old in zip(engine.model.parameters(), states[rank], strict=True):
                    p.copy_(old)
            put(engine.accumulator.optimizer, kept)

    found = survivors_of(4, (1, 2, 3), first)
    assert [told for told, _ in found] == ["standing of 2", None, "standing of 2"]
    assert {bits for _, bits in found} == {undisturbed(5)}


def flat(state):
    return [((n, k), v) for n, one in state["state"].items() for k, v in one.items()]


def put(optimizer, kept):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for (n, k), value in kept.items():
        optimizer.state[parameters[n]][k] = value


def test_statistics_of_batch_norm_do_not_count_a_micro_step_twice():
    counts = []

    def before(engine, rank):
        train(engine, rank, 4, range(2))
        counts.append(int(engine.model[1].num_batches_tracked))
        train(engine, rank, 4, [2], most=1)
        engine._undo()
        assert int(engine.model[1].num_batches_tracked) == counts[-1]

    survivors_of(4, (0, 1), before, job=Normed)
    assert counts
