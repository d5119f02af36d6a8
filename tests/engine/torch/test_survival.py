"""An engine continues in another group, with the state of the most advanced rank."""

import copy
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from orchestrator.errors import PeerLost, StateLost
from orchestrator.local_ranks.threads import run_in_threads
from orchestrator.plan.split import split_leaves
from tests.engine.torch.jobs import Curve, engine_of
from tests.engine.windows import compute, run, window_of

SETTINGS = {
    "optimizer": {"name": "adam"},
    "reduction": "reproducible",
    "survive": True,
}


class Normed(Curve):
    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def windows(engine, updates):
    group = engine.accumulator.group
    split = split_leaves(28, group.size, 4)
    return [window_of(split, group.rank, update) for update in updates]


def train(engine, updates):
    return run(engine, windows(engine, updates))


def break_off(engine, update):
    """Compute the first micro-step of an update alone."""
    compute(engine, *windows(engine, [update]), most=1)


def begun(ranks, before, job=Curve, settings=SETTINGS):
    """Return the engines of so many ranks after `before(engine, rank)` on each."""
    engines = {}

    def rank(group):
        engine = engines[group.rank] = engine_of(job(), group, **settings)
        before(engine, group.rank)

    run_in_threads(ranks, rank)
    return engines


@pytest.mark.parametrize("survive", [True, False])
def test_each_rank_saves_what_was_before_a_window_that_it_leaves(tmp_path, survive):
    """Any of them may be the one that is left, or chosen, to save the last boundary."""
    before = {}

    def leave(engine, rank):
        train(engine, range(2))
        before[rank] = copy.deepcopy(engine.model.state_dict())
        break_off(engine, 2)

    settings = {**SETTINGS, "survive": survive}
    for rank, engine in begun(2, leave, Normed, settings).items():
        folder = tmp_path / str(rank)
        folder.mkdir()
        engine.save_state(folder)
        assert engine.model.state_dict()["1.running_mean"].equal(before[rank]["1.running_mean"])
        saved = load_file(folder / "weights.safetensors")
        assert all(saved[name].equal(tensor) for name, tensor in before[rank].items())


def go_on(engine, group, done, standing="", first=2):
    """Take the engine, with `done` updates, into another group and train up to five updates."""
    standing = engine.catch_up(group, done, standing)
    engine.regroup(group)
    train(engine, range(first, 5))
    return standing, engine.weights_sha256()


def undisturbed():
    return begun(4, lambda engine, rank: train(engine, range(5)))[0].weights_sha256()


def survivors_of(left, before, job=Curve, ahead=None):
    """Call `before(engine, rank)` on four ranks; then those in `left` meet in a group of their own.

    All have applied two updates, the rank `ahead` three.
    """
    engines = begun(4, before, job)

    def then(group):
        rank = left[group.rank]
        done, first = 3 if rank == ahead else 2, 2 if ahead is None else 3
        return go_on(engines[rank], group, done, f"standing of {rank}", first)

    return run_in_threads(len(left), then)


@pytest.mark.parametrize("reduction", ["fast", "reproducible"])
def test_without_a_loss_survival_changes_nothing(reduction):
    def rank(group, survive):
        settings = {**SETTINGS, "reduction": reduction, "survive": survive}
        engine = engine_of(Normed(), group, **settings)
        train(engine, range(4))
        return engine.weights_sha256(), group.counters

    on, off = (run_in_threads(4, partial(rank, survive=survive)) for survive in (True, False))
    assert on == off


def test_a_window_that_broke_off_is_redone_by_fewer_ranks_with_the_same_bits():
    def before(engine, rank):
        train(engine, range(2))
        break_off(engine, 2)

    assert survivors_of((1, 3), before) == [(None, undisturbed())] * 2


def test_a_rank_behind_by_one_update_gets_its_state_from_one_that_applied_it():
    # ranks 1 and 3 are as they were after 2 updates: the third never came to its end there
    def first(engine, rank):
        train(engine, range(2))
        weights = copy.deepcopy(engine.model.state_dict())
        optimizer = copy.deepcopy(engine.accumulator.optimizer_state())
        train(engine, [2])
        if rank == 2:
            break_off(engine, 3)
        else:
            engine.model.load_state_dict(weights)
            engine.accumulator.load_optimizer_state(optimizer)

    found = survivors_of((1, 2, 3), first, ahead=2)
    assert [standing for standing, _ in found] == ["standing of 2", None, "standing of 2"]
    assert {bits for _, bits in found} == {undisturbed()}


def ready_to_grow(engine, rank):
    train(engine, range(2))
    engine.before_growth()


def joined_by_one(settings, ranks=3):
    """Ranks train two updates, one more, built alone, comes in, and they train three more."""
    engines = begun(ranks, ready_to_grow, settings=settings)
    engines[ranks] = begun(1, lambda engine, rank: None, settings=settings)[0]

    def then(group):
        done = 0 if group.rank == ranks else 2
        return go_on(engines[group.rank], group, done, f"standing of {group.rank}")

    return run_in_threads(ranks + 1, then)


def test_a_new_rank_gets_the_state_and_the_bits_are_those_of_as_many_ranks_from_the_start():
    found = joined_by_one(SETTINGS)
    assert [standing for standing, _ in found] == [None, None, None, "standing of 0"]
    assert {bits for _, bits in found} == {undisturbed()}


def test_a_new_rank_takes_the_agreed_order_of_buckets():
    found = joined_by_one({**SHARDED, "shard_optimizer": False, "bucket_bytes": 64})
    assert len({bits for _, bits in found}) == 1


def test_the_boundary_reports_waiting_ranks_to_all_ranks():
    def be(engine, rank):
        for update, waiting in enumerate((False, True, False)):
            engine.newcomers_wait(waiting and rank == 1)
            [report] = train(engine, [update])
            assert report.newcomers == waiting

    begun(3, be)


class Remembering(nn.BatchNorm1d):
    """Puts another tensor in a buffer's place in each forward, and counts in extra state."""

    calls = 0

    def __init__(self, channels):
        super().__init__(channels)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x.detach().sum()[None]])
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class RemembersAll(Curve):
    def model(self):
        return nn.Sequential(nn.Linear(4, 8), Remembering(8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("job", [Normed, RemembersAll])
def test_what_a_forward_changes_does_not_count_a_micro_step_twice(job):
    def be(engine, rank):
        train(engine, range(2))
        before = copy.deepcopy(engine.model.state_dict())
        break_off(engine, 2)
        assert not torch.equal(engine.model[1].running_mean, before["1.running_mean"])
        engine._undo()
        after = engine.model.state_dict()
        assert after.pop("1._extra_state", None) == before.pop("1._extra_state", None)
        assert {n for n, value in after.items() if not torch.equal(value, before[n])} == set()

    begun(2, be, job)


def test_what_is_saved_inside_a_window_is_the_state_at_its_beginning(tmp_path):
    def be(engine, rank):
        train(engine, range(2))
        before = engine.weights_sha256()
        break_off(engine, 2)
        if rank == 0:
            assert engine.weights_sha256() != before
            engine.save_state(tmp_path)
            assert int(load_file(tmp_path / "weights.safetensors")["1.num_batches_tracked"]) == 8
            assert engine.weights_sha256() == before

    begun(2, be, Normed, {**SETTINGS, "survive": False})


class Caching(nn.Linear):
    """Keeps a cache that grows with what it is called on, as for positions."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x):
        size = 1 + int(x.abs().sum() * 10) % 7
        if size > len(self.cache):
            self.cache = torch.zeros(size)
        return super().forward(x)


class Caches(Curve):
    def model(self):
        return nn.Sequential(Caching(4, 8), nn.Tanh(), nn.Linear(8, 1))


def test_survivors_go_on_although_their_caches_have_other_sizes():
    sizes = {}

    def before(engine, rank):
        train(engine, range(2))
        sizes[rank] = len(engine.model[0].cache)

    assert len({bits for _, bits in survivors_of((1, 3), before, job=Caches)}) == 1
    assert sizes[1] != sizes[3]


# ------------------------------------------------------------------ an optimizer in shards

SHARDED = {
    "optimizer": {"name": "adam"},
    "shard_optimizer": True,
    "survive": True,
    "clip_norm": 1.0,
}
OWNED = SHARDED | {"shard_by": "parameters"}


def saving(folder, saved):
    """Return what trains two updates and saves their state; the rest of it goes to `saved`."""

    def save(engine, rank):
        train(engine, range(2))
        engine.gather_state()
        if rank == 0:
            saved.update(engine.save_state(folder))

    return save


def of_a_checkpoint(folder, savers, loaders, settings=SHARDED):
    """The weights after five updates: two by `savers`, and three by `loaders` from a checkpoint."""
    saved = {}
    begun(savers, saving(folder, saved), settings=settings)

    def go_on(engine, rank):
        engine.load_state(folder, saved)
        train(engine, range(2, 5))

    return begun(loaders, go_on, settings=settings)[0].weights_sha256()


def in_the_window(engine):
    break_off(engine, 2)


def before_weights_come(engine):
    """Its optimizer has stepped, and what the others have stepped does not come."""
    group = engine.accumulator.group
    gather = group.gather_in_place_async

    def lost(*bucket):
        gather(*bucket).wait()  # the others are not to wait for ever
        raise PeerLost("gone")

    group.gather_in_place_async = lost
    with pytest.raises(PeerLost):
        train(engine, [2])


@pytest.mark.parametrize("settings", [SHARDED, OWNED], ids=["pieces", "owners"])
@pytest.mark.parametrize("ranks", [3, 1])
def test_shards_are_cut_anew_for_a_newcomer(tmp_path, ranks, settings):
    expected = of_a_checkpoint(tmp_path, ranks, ranks + 1, settings)
    assert {bits for _, bits in joined_by_one(settings, ranks)} == {expected}


def test_a_second_loss_while_regrouping_takes_the_state_from_ranks_that_have_it(tmp_path):
    engines = begun(4, ready_to_grow, settings=SHARDED)

    def second(group):  # of 1, 2 and 3, where 3 goes away before the end
        engines[1 + group.rank].catch_up(group, 2, "")
        if group.rank == 1:
            engines[2]._whole_state = None

    run_in_threads(3, second)
    found = run_in_threads(2, lambda group: go_on(engines[1 + group.rank], group, 2)[1])
    assert found == [of_a_checkpoint(tmp_path, 4, 2)] * 2


@pytest.mark.parametrize("settings", [SHARDED, OWNED], ids=["pieces", "owners"])
@pytest.mark.parametrize("left", [(0, 2, 3), (1,)], ids=len)
@pytest.mark.parametrize("breaks_off", [in_the_window, before_weights_come])
def test_a_lost_shard_comes_from_a_checkpoint_and_kept_state_is_not_used_before(
    tmp_path, left, breaks_off, settings
):
    saved = {}

    def first(engine, rank):
        saving(tmp_path, saved)(engine, rank)
        breaks_off(engine)

    engines = begun(4, first, settings=settings)

    def again(group, whole):
        engine = engines[left[group.rank]]
        with pytest.raises(StateLost, match="no rank has the part of rank"):
            engine.catch_up(group, 2, "")
        engine.regroup(group)
        if whole or group.rank:  # the first time a rank is lost before all have loaded it
            engine.load_state(tmp_path, saved)
        if whole:
            train(engine, range(2, 5))
        return engine.weights_sha256()

    run_in_threads(len(left), partial(again, whole=False))
    found = run_in_threads(len(left), partial(again, whole=True))
    (tmp_path / "again").mkdir()
    assert set(found) == {of_a_checkpoint(tmp_path / "again", 4, len(left), settings)}
