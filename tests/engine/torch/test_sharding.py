"""An optimizer in shards takes the steps of a whole one, with 1/R of its memory."""

import json
from functools import partial

import pytest
import torch
from torch import nn, optim

from jobs.contrastive import Contrastive
from jobs.jepa import Jepa
from orchestrator.engine.torch import Accumulator, Loss, TorchGroup
from orchestrator.engine.torch.sharding import ELEMENTWISE
from orchestrator.errors import ConfigError, JobError
from orchestrator.local_ranks.threads import run_in_threads
from orchestrator.plan.split import split_window
from tests.engine.torch.jobs import SAMPLES, Curve, engine_of, sgd_accumulator
from tests.engine.windows import run, window_of
from tests.jobs.training import train
from tests.laws.problem import difference
from tests.refusals import refused

MORE = [
    (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (optim.Adam, {"amsgrad": True}),
    (optim.AdamW, {"fused": True}),
    (optim.AdamW, {"foreach": True, "maximize": True}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
]
WAYS = [(kind, {}) for kind in ELEMENTWISE] + MORE
SAMPLES_OF_RANKS = ([12], [12, 0, 0], [3, 1, 4, 1, 3])


def _named(way):
    kind, settings = way
    return "-".join([kind.__name__, *settings])


class Net(nn.Module):
    """Parameters of odd sizes, single numbers, strided, complex, tied, frozen, unused."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 7), nn.Linear(6, 7)
        self.first.weight = self.last.weight
        self.strided = nn.Parameter(torch.randn(7, 3).t())
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.never = nn.Parameter(torch.randn(5))

    def forward(self, x):
        x = torch.tanh(self.first(x)) * self.last(x) + self.frozen
        x = (x @ self.strided.t()).to(self.turn.dtype) * self.turn
        return x.abs() * self.scale


def _net():
    torch.manual_seed(0)
    net = Net().double()  # which would make real numbers of complex ones
    net.turn = nn.Parameter(torch.randn(3, dtype=torch.complex128))
    return net


def _optimizer(way, net):
    """Two groups, of different rates; of all parameters, the frozen one as well."""
    kind, settings = way
    rest = [p for name, p in net.named_parameters() if name not in ("scale", "turn")]
    slow = {"params": [net.scale, net.turn], "lr": 0.003}
    if kind is not optim.Rprop:
        slow["weight_decay"] = 0.1
    if settings.get("fused"):  # not for complex numbers
        net.turn.requires_grad_(requires_grad=False)
        slow["params"] = [net.scale]
    return kind([slow, {"params": rest}], lr=0.01, **settings)


def _data(dtype=torch.float64):
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    return x, x.sum(1, keepdim=True).sin()


def _update(ours, net, group, sizes):
    """One window, the rank's samples in micro-steps of two."""
    x, y = _data()
    first = sum(sizes[: group.rank])
    mine = torch.arange(first, first + sizes[group.rank])
    pieces = mine.split(2) if len(mine) else ()
    for number, piece in enumerate(pieces):
        total = ((net(x[piece]) - y[piece]) ** 2).sum()
        ours.backward(Loss(total, len(piece)), last=number == len(pieces) - 1)
    return ours.boundary()


def _weights(net):
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def _trained(way, sizes, group, updates=3, **more):
    net = _net()
    ours = Accumulator(net, _optimizer(way, net), group, **more)
    for _ in range(updates):
        report = _update(ours, net, group, sizes)
    ours.close()
    return net, ours, report


# ------------------------------------------------------------------ the same update


@pytest.mark.parametrize("way", WAYS, ids=_named)
def test_every_shardable_optimizer_takes_the_steps_of_an_unsharded_one(way):
    net, ours, whole = _trained(way, [12], TorchGroup.alone(), clip_norm=0.5)
    wanted, state = _weights(net), ours.optimizer_state()

    def be(group, sizes):
        net, ours, report = _trained(
            way, sizes, group, clip_norm=0.5, bucket_bytes=100, shard_optimizer=True
        )
        return _weights(net), report.gradient_norm, ours.optimizer_state()

    for sizes in SAMPLES_OF_RANKS:
        results = run_in_threads(len(sizes), partial(be, sizes=sizes))
        for weights, norm, _ in results:
            # Adam and its kin divide by roots, which magnifies a gradient's last bits.
            assert difference(weights, wanted) <= 1e-10
            assert difference(weights, results[0][0]) == 0
            assert norm == pytest.approx(whole.gradient_norm, rel=1e-12)
        (_, _, gathered), *others = results
        assert all(found is None for _, _, found in others)
        # The same keys, shapes and dtypes, and nearly the same numbers, as of a whole optimizer.
        assert gathered["param_groups"] == state["param_groups"]
        assert gathered["state"].keys() == state["state"].keys()
        for number, values in state["state"].items():
            found = gathered["state"][number]
            assert list(found) == list(values)
            for key, value in values.items():
                torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-13)


def test_ranks_share_the_state_of_the_optimizer():
    def be(group):
        net = _half_net(torch.float32)
        optimizer = optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        ours = Accumulator(net, optimizer, group, shard_optimizer=True)
        ours.backward(Loss(net(torch.ones(2, 6)).sum(), 2))
        ours.boundary()
        return sum(held["momentum_buffer"].numel() for held in optimizer.state.values())

    found, whole = run_in_threads(3, be), 6 * 5 + 5 + 5 + 1
    assert sum(found) == whole
    assert found == pytest.approx([whole / 3] * 3, abs=4)


def _half_net(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)


def _with_masters(dtype, sizes, updates):
    """Return the weights of `updates` steps on float32 masters, in one process, by hand."""
    net = _half_net(dtype)
    masters = [p.detach().float() for p in net.parameters()]
    optimizer = optim.AdamW(masters, lr=1e-3, weight_decay=0.1)
    for _ in range(updates):
        sums = [torch.zeros_like(master) for master in masters]
        for batch in _data(dtype)[0][: sum(sizes)].split(sizes):
            net.zero_grad()
            net(batch).square().sum().backward()
            for total, parameter in zip(sums, net.parameters(), strict=True):
                total.add_(parameter.grad)
        for master, total in zip(masters, sums, strict=True):
            master.grad = total / sum(sizes)
        optimizer.step()
        for parameter, master in zip(net.parameters(), masters, strict=True):
            parameter.data.copy_(master)
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_that_are_halves_step_from_float32_masters(dtype, ranks):
    """Steps of a thousandth would be lost in most weights of bfloat16."""
    sizes, (data, _) = [2] * ranks, _data(dtype)

    def be(group):
        net = _half_net(dtype)
        optimizer = optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
        ours = Accumulator(net, optimizer, group, bucket_bytes=64, shard_optimizer=True)

        def train(updates):
            for _ in range(updates):
                batch = data[2 * group.rank : 2 * group.rank + 2]
                ours.backward(Loss(net(batch).square().sum(), 2))
                ours.boundary()

        train(4)
        state = ours.optimizer_state()
        assert state is None or "master" in state["state"][0]
        found = [p.detach().clone() for p in net.parameters()]
        with torch.no_grad():  # weights written from outside count
            net[2].weight.fill_(0.5)
        train(1)
        assert (net[2].weight - 0.5).abs().max() <= 4e-3
        return found

    wanted = _with_masters(dtype, sizes, 4)
    plain = [p.detach() for p in _half_net(dtype).parameters()]
    for found in run_in_threads(ranks, be):
        assert all(map(torch.equal, found, wanted))
        assert not any(map(torch.equal, found, plain))


@pytest.mark.parametrize("shard", [True, False])
def test_state_of_halves_fits_with_and_without_shards(shard):
    nets, group = [_half_net(torch.bfloat16) for _ in range(2)], TorchGroup.alone()
    ours = [
        Accumulator(net, optim.Adam(net.parameters(), lr=0.1), group, shard_optimizer=which)
        for net, which in zip(nets, (shard, not shard), strict=True)
    ]

    def update(number):
        ours[number].backward(Loss(nets[number](torch.ones(2, 6).bfloat16()).sum(), 2))
        ours[number].boundary()

    update(0)
    nets[1].load_state_dict(nets[0].state_dict())
    ours[1].load_optimizer_state(ours[0].optimizer_state())
    for number in (0, 1):
        update(number)
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)


def test_sums_of_halves_are_as_good_as_float32s():
    net, steps = _half_net(torch.bfloat16), 256
    data = torch.randn(steps, 3, 6).bfloat16()
    ours = Accumulator(net, optim.SGD(net.parameters(), lr=1.0), TorchGroup.alone())
    exact = [torch.zeros(p.shape, dtype=torch.float64) for p in net.parameters()]
    for batch in data:
        for total, gradient in zip(
            exact, torch.autograd.grad(net(batch).square().sum(), net.parameters()), strict=True
        ):
            total.add_(gradient)
        ours.backward(Loss(net(batch).square().sum(), 3))
    ours.boundary()
    for view, total in zip(ours.buffers.views, exact, strict=True):
        assert (view.double() * 3 * steps - total).norm() <= 1e-6 * total.norm()
    ours.close()
    net(data[0]).sum().backward()
    assert {p.grad.dtype for p in net.parameters()} == {torch.bfloat16}


def test_more_ranks_than_numbers_leave_ranks_without_pieces():
    def be(group):
        net = nn.Linear(2, 1, bias=False).double()
        nn.init.ones_(net.weight)
        optimizer = optim.Adam([{"params": [net.weight]}], lr=0.1)
        ours = Accumulator(net, optimizer, group, shard_optimizer=True)
        for _ in range(2):
            ours.backward(Loss(net(torch.ones(1, 2).double()).sum(), 1), last=True)
            ours.boundary()
        return net.weight.detach().clone(), ours.optimizer_state()

    results = run_in_threads(5, be)
    for found, _ in results:
        torch.testing.assert_close(found, torch.full((1, 2), 0.8).double())
    [state] = results[0][1]["state"].values()
    assert state["exp_avg"].shape == (1, 2)
    assert state["step"] == 2


def test_one_rank_keeps_its_optimizer_as_it_was():
    net = _net()
    optimizer = _optimizer(WAYS[0], net)
    before = [p for group in optimizer.param_groups for p in group["params"]]
    Accumulator(net, optimizer, TorchGroup.alone(), shard_optimizer=True)
    after = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("job", "more"),
    [
        (Contrastive(hidden=16, width=6, dropout=0.0), {}),
        (Jepa(width=16, layers=1, horizon=6), {"optimizer": {}}),
    ],
    ids=["embeddings", "after_update"],
)
def test_jobs_that_do_more_than_micro_steps_take_the_same_steps(job, more):
    given = {"samples": 10, "cap": 3, "updates": 2, **more}
    [(wanted, reports, _)] = train(job, 1, **given)
    for found, sharded, engine in train(job, 3, **given, shard_optimizer=True, bucket_bytes=512):
        assert engine.accumulator.sharded
        assert difference(found, wanted) <= 1e-8  # Adam's roots magnify the last bits
        assert [r.loss for r in sharded] == pytest.approx([r.loss for r in reports], rel=1e-12)


# ------------------------------------------------------------------ skipped or refused


class Theirs(optim.SGD):
    pass


def _stepped(net):
    optimizer = optim.Adam(net.parameters())
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return optimizer


REFUSALS = {
    "a subclass": (
        lambda net: Theirs(net.parameters(), lr=0.1),
        {},
        "tests.engine.torch.test_sharding.Theirs",
    ),
    "adagrad": (
        lambda net: optim.Adagrad(net.parameters()),
        {},
        "SGD",
    ),
    "state": (_stepped, {}, "Adam state"),
    "another model's": (
        lambda net: optim.SGD([*net.parameters(), nn.Parameter(torch.ones(3, 2))], lr=0.1),
        {},
        "(3, 2)",
    ),
    "reproducible": (optim.SGD, {"reduction": "reproducible"}, "reproducible"),
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_unshardable_optimizers_are_refused_on_any_number_of_ranks(name, ranks):
    build, more, names = REFUSALS[name]

    def be(group):
        torch.manual_seed(0)
        net = nn.Linear(3, 2)
        optimizer = build(net.parameters() if build is optim.SGD else net)
        with refused(ConfigError, names):
            Accumulator(net, optimizer, group, shard_optimizer=True, **more)

    run_in_threads(ranks, be)


def test_parameters_that_share_memory_are_refused():
    net = nn.Linear(4, 4)
    net.more = nn.Parameter(net.weight.detach()[2:])
    with refused(ConfigError, "weight more"):
        sgd_accumulator(net, shard_optimizer=True)


@pytest.mark.parametrize(
    ("kind", "in_order_of_memory"), [("frozen", "same weight"), ("buffer", "weight same")]
)
def test_what_shares_a_trained_parameters_memory_is_not_left_behind(kind, in_order_of_memory):
    net = nn.Linear(4, 4)
    if kind == "frozen":
        net.same = nn.Parameter(net.weight.detach(), requires_grad=False)
    else:
        net.register_buffer("same", net.weight.detach()[3:])
    with refused(ConfigError, in_order_of_memory):
        sgd_accumulator(net, shard_optimizer=True)


def test_a_closed_accumulators_shards_are_not_stepped_in_silence():
    def be(group):
        net = _net()
        optimizer = _optimizer(WAYS[0], net)
        Accumulator(net, optimizer, group, shard_optimizer=True).close()
        with pytest.raises(JobError, match="this optimizer holds pieces of parameters"):
            optimizer.step()

    run_in_threads(2, be)


def test_a_model_that_is_moved_away_from_its_shards_is_noticed():
    def be(group):
        net = _net()
        ours = Accumulator(net, _optimizer(WAYS[0], net), group, shard_optimizer=True)
        net.last.bias.data = net.last.bias.data.clone()
        with refused(JobError, "last.bias"):
            _update(ours, net, group, [5, 7])

    run_in_threads(2, be)


# ------------------------------------------------------------------ saved and resumed


def _engine(group, optimizer, *, shard, dropout=0.0, **more):
    given = {"optimizer": optimizer, "shard_optimizer": shard, "bucket_bytes": 64, **more}
    return engine_of(Curve(dropout), group, **given)


def _windows(group, *updates):
    split = split_window(SAMPLES, group.size, cap=4)
    return [window_of(split, group.rank, update) for update in updates]


def _save(group, folder, optimizer, *, shard, **more):
    """Train, and save as the worker does; gives the digest."""
    engine = _engine(group, optimizer, shard=shard, **more)
    run(engine, _windows(group, 0, 1))
    assert engine.holds_state() == (not shard or group.size == 1)
    engine.gather_state()
    if group.rank == 0:
        assert engine.holds_state()
        (folder / "extra.json").write_text(json.dumps(engine.save_state(folder)))
        (folder / "scale.json").write_text(json.dumps(engine.accumulator.precision.state()))
    elif shard:
        with pytest.raises(RuntimeError, match="saved on rank 0"):
            engine.save_state(folder)
    group.barrier()
    engine.begin_window(*_windows(group, 2))
    assert engine.holds_state() == (not shard or group.size == 1)  # what was gathered is old now
    return engine.weights_sha256()


def _resume(group, folder, optimizer, *, shard, **more):
    """Load, train two more updates; gives the digests before and after, and the weights."""
    engine = _engine(group, optimizer, shard=shard, **more)
    engine.load_state(folder, json.loads((folder / "extra.json").read_text()))
    loaded = engine.weights_sha256()
    assert engine.accumulator.precision.state() == json.loads((folder / "scale.json").read_text())
    run(engine, _windows(group, 2, 3))
    return loaded, engine.weights_sha256(), _weights(engine.model)


def _through(group, optimizer, *, shard, **more):
    engine = _engine(group, optimizer, shard=shard, **more)
    run(engine, _windows(group, *range(4)))
    return engine.weights_sha256(), _weights(engine.model)


ADAM = {"name": "adamw"}
NADAM = {"_target_": "torch.optim.NAdam"}  # has more than one number for a parameter


@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        (ADAM, "bfloat16"),
        (NADAM, "float64"),
        ({"name": "sgd", "momentum": 0.9}, "float32"),
        (ADAM, "float16"),
    ],
    ids=str,
)
def test_a_run_resumes_with_the_same_bits(tmp_path, optimizer, precision, shard):
    more = {"optimizer": optimizer, "precision": precision, "shard": shard, "dropout": 0.3}
    saved = run_in_threads(3, partial(_save, folder=tmp_path, **more))
    found = run_in_threads(3, partial(_resume, folder=tmp_path, **more))
    wanted = run_in_threads(3, partial(_through, **more))
    assert {loaded for loaded, *_ in found} == {*saved}
    assert {after for _, after, _ in found} == {digest for digest, _ in wanted}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((3, True), (2, True)),
        ((2, True), (2, False)),
        ((3, False), (2, True)),
        ((2, True), (1, True)),
    ],
    ids=str,
)
def test_a_checkpoint_does_not_know_of_shards(tmp_path, before, after):
    """From (ranks, sharded) to other ones, with the same weights and, nearly, the same steps."""
    more = {"optimizer": NADAM, "precision": "float64"}
    (saved, *_) = run_in_threads(
        before[0], partial(_save, folder=tmp_path, shard=before[1], **more)
    )
    found = run_in_threads(after[0], partial(_resume, folder=tmp_path, shard=after[1], **more))
    [(_, wanted)] = run_in_threads(1, partial(_through, shard=False, **more))
    for loaded, _, weights in found:
        assert loaded == saved
        assert difference(weights, wanted) <= 1e-10


def test_the_optimizer_state_of_another_model_is_refused():
    def be(group):
        engine = _engine(group, ADAM, shard=True)
        other = _stepped(nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 1))).state_dict()
        with pytest.raises(ValueError, match=r"the saved state of \S+ is of shape"):
            engine.accumulator.load_optimizer_state(other)

    run_in_threads(2, be)
