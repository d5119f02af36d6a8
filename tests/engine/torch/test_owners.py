"""Optimizers that need whole parameters, in shards: each parameter has a rank that steps it."""

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim

from orchestrator.engine.torch import Accumulator, Loss, TorchGroup
from orchestrator.engine.torch.owners import ownership
from orchestrator.errors import ConfigError
from orchestrator.local_ranks.processes import run_ranks
from orchestrator.local_ranks.threads import run_in_threads
from tests.engine.torch.jobs import numbers_of

RANKS = (1, 2, 3, 5)
X = torch.randint(-4, 5, (30, 8), generator=torch.Generator().manual_seed(1)).double()


class Net(nn.Module):
    """Matrices, one of them of odd size, and the rest that an optimizer like Muon leaves to AdamW.

    Its gradients are sums of whole numbers, which have the same bits in any order.
    """

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        shapes = [(8, 8), (8, 16), (5, 7), (8, 8), (3, 8), (8, 24), (4, 4)]
        self.matrices = nn.ParameterList(
            torch.randint(-3, 4, shape).to(dtype) / 4 for shape in shapes
        )
        self.embedding = nn.Parameter(torch.randint(-3, 4, (40, 8)).to(dtype) / 4)
        self.bias = nn.Parameter(torch.ones(9, dtype=dtype))

    def forward(self, x):
        x = x.to(self.bias.dtype)
        parts = [(x @ self.embedding.T)[:, ::3].sum()]
        for number, weight in enumerate(self.matrices, start=1):
            parts.append((x[:, : len(weight)] @ weight).sum() * number)
        parts.append((x[:, :1] * self.bias).sum())
        return sum(parts)


def trained_parameters(optimizer):
    """Yield each parameter that has a gradient, and its group."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                yield p, group


class Lamb(optim.Optimizer):
    """SGD with each parameter's step scaled to its norm, as in LAMB."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for p, group in trained_parameters(self):
            self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.5)
            mean = self.state[p]["mean"]
            p.add_(mean * (p.norm() / (mean.norm() + 1e-9)), alpha=-group["lr"])


class Shampoo(Lamb):
    """Statistics of rows and columns, in a list, as in Shampoo; and a number of steps."""

    @torch.no_grad()
    def step(self):
        for p, group in trained_parameters(self):
            state, grad = self.state[p], p.grad.reshape(p.shape[0], -1)
            if not state:
                state["step"] = 0
                state["statistics"] = [torch.eye(n, dtype=p.dtype) for n in grad.shape]
            state["step"] += 1
            left, right = state["statistics"]
            left += grad @ grad.T
            right += grad.T @ grad
            step = torch.linalg.solve(left, grad) @ torch.linalg.inv(right).sqrt().nan_to_num()
            p.sub_(step.reshape(p.shape), alpha=group["lr"])


class MuonWithAdamW(optim.Optimizer):
    """Matrices by an orthogonal step, the rest by AdamW's, in one optimizer."""

    def __init__(self, matrices, rest):
        groups = [
            {"params": matrices, "orthogonal": True, "shard_by": "parameters"},
            {"params": rest, "orthogonal": False, "shard_by": "elements"},
        ]
        super().__init__(groups, {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        for p, group in trained_parameters(self):
            state = self.state[p]
            if group["orthogonal"]:
                state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                u, _, v = torch.linalg.svd(state["momentum"], full_matrices=False)
                p.sub_(u @ v, alpha=group["lr"])
            else:
                state.setdefault("square", torch.zeros_like(p)).lerp_(p.grad**2, 0.1)
                p.sub_(p.grad / (state["square"].sqrt() + 1e-8), alpha=group["lr"])


def _matrices(net):
    return list(net.matrices)


KINDS = {
    "muon": (lambda net: optim.Muon(_matrices(net), lr=0.02), {}),
    "adafactor": (lambda net: optim.Adafactor(net.parameters(), lr=0.01), {}),
    "lamb": (lambda net: Lamb(net.parameters()), {"shard_by": "parameters"}),
    "shampoo": (lambda net: Shampoo(_matrices(net)), {"shard_by": "parameters"}),
    "mixed": (lambda net: MuonWithAdamW(_matrices(net), [net.embedding, net.bias]), {}),
    "adamw": (lambda net: optim.AdamW(net.parameters()), {"shard_by": "parameters"}),
}


def _trained(kind, group, updates=3, state=None, *, dtype=torch.float64, **more):
    """Train on this rank's part; return (weights, reports, the state, numbers of state held)."""
    build, options = KINDS[kind]
    net = Net(dtype)
    if "shard_optimizer" not in more:
        options = {}
    optimizer = build(net)
    trained = [p for g in optimizer.param_groups for p in g["params"]]
    named = [(name, p) for name, p in net.named_parameters() if any(p is t for t in trained)]
    ours = Accumulator(named, optimizer, group, bucket_bytes=1500, **options, **more)
    if state is not None:
        weights, of_optimizer = copy.deepcopy(state)  # ranks are threads here
        net.load_state_dict(weights)
        ours.load_optimizer_state(of_optimizer)
    reports = []
    for _ in range(updates):
        for part in X[group.rank :: group.size].split(4):
            ours.backward(Loss(net(part), weight=len(part)))
        reports.append(ours.boundary())
    held = sum(map(_numbers, optimizer.state.values()))
    weights = {name: p.detach().clone() for name, p in net.state_dict().items()}
    return numbers_of(net), reports, (weights, ours.optimizer_state()), held


def _numbers(value):
    if isinstance(value, torch.Tensor):
        return value.numel()
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_numbers, values))


def _expect_equal_state(found, wanted, rtol=1e-12):
    assert found["param_groups"] == wanted["param_groups"]
    assert list(found["state"]) == list(wanted["state"])
    for number, values in wanted["state"].items():
        assert list(found["state"][number]) == list(values)
        torch.testing.assert_close(found["state"][number], values, rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_owners_take_the_steps_of_an_unsharded_optimizer_on_any_ranks(kind):
    wanted, whole_reports, (_, state), whole = _trained(kind, TorchGroup.alone(), clip_norm=1e4)
    for ranks in RANKS:
        train = partial(_trained, kind, clip_norm=1e4, shard_optimizer=True)
        results = run_in_threads(ranks, train)
        for weights, reports, _, _ in results:
            torch.testing.assert_close(weights, wanted, rtol=1e-12, atol=1e-14)
            assert torch.equal(weights, results[0][0])
            norms = [report.gradient_norm for report in reports]
            assert norms == pytest.approx([r.gradient_norm for r in whole_reports], rel=1e-12)
        _expect_equal_state(results[0][2][1], state)
        assert all(others[1] is None for _, _, others, _ in results[1:])
        steps = ranks * len(state["state"])  # a number of steps for each piece, at the most
        assert whole <= sum(held for *_, held in results) <= whole + steps


def test_the_step_of_whole_parameters_has_the_unsharded_bits_where_gradients_have():
    """Without clipping, whose factor follows from a norm that is added up in another order."""
    for kind in ("muon", "lamb", "shampoo"):
        wanted, *_ = _trained(kind, TorchGroup.alone())
        for ranks in RANKS:
            for weights, *_ in run_in_threads(ranks, partial(_trained, kind, shard_optimizer=True)):
                assert torch.equal(weights, wanted), (kind, ranks)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_goes_on_on_other_ranks_and_without_shards(kind):
    wanted, *_ = _trained(kind, TorchGroup.alone(), updates=4)
    for before, after in ((1, 3), (3, 2), (2, 5)):
        first = partial(_trained, kind, updates=2, shard_optimizer=True)
        (_, _, state, _), *_ = run_in_threads(before, first)
        rest = partial(_trained, kind, updates=2, state=state)
        for shard in ({"shard_optimizer": True}, {}):
            for weights, *_ in run_in_threads(after, partial(rest, **shard)):
                torch.testing.assert_close(weights, wanted, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kind", ["muon", "mixed", "lamb"])
def test_halves_that_are_stepped_whole_have_masters(kind):
    def train(group):
        return _trained(kind, group, dtype=torch.bfloat16, shard_optimizer=True)

    results = run_in_threads(2, train)
    state = results[0][2][1]
    assert all("master" in values for values in state["state"].values())
    shape = next(iter(state["state"].values()))["master"].shape
    first = {(8, 8): "matrices.0", (40, 8): "embedding"}[tuple(shape)]
    master, weight = state["state"][0]["master"], results[0][2][0][first]
    assert master.dtype == torch.float32
    assert torch.equal(master.bfloat16(), weight)
    (again, *_), *_ = run_in_threads(3, partial(_resumed, kind, results[0][2]))
    (undisturbed, *_), *_ = run_in_threads(
        2, lambda group: _trained(kind, group, 4, dtype=torch.bfloat16, shard_optimizer=True)
    )
    torch.testing.assert_close(again, undisturbed, rtol=0.02, atol=0.02)


def _resumed(kind, state, group):
    return _trained(kind, group, 1, state, dtype=torch.bfloat16, shard_optimizer=True)


def test_as_many_bytes_travel_as_with_pieces_and_no_collective_runs_in_the_step():
    def train(group, **options):
        net = Net()
        optimizer = optim.AdamW(net.parameters())
        ours = Accumulator(net, optimizer, group, shard_optimizer=True, **options)
        calls = []
        optimizer.register_step_pre_hook(lambda *_: calls.append(group.counters.collectives))
        optimizer.register_step_post_hook(lambda *_: calls.append(group.counters.collectives))
        ours.backward(Loss(net(X[:4]), 4))
        report = ours.boundary()
        assert calls[0] == calls[1]
        return report.bytes_on_wire

    for ranks in RANKS[1:]:
        pieces = run_in_threads(ranks, train)[0]
        owners = run_in_threads(ranks, partial(train, shard_by="parameters"))[0]
        assert owners <= 1.02 * pieces


def test_owners_have_as_much_to_do_as_each_other():
    """48 matrices of a transformer's sizes: no rank has more than 1.1 of the mean."""
    trained = [
        (f"{layer}.{name}", torch.empty(shape, device="meta"))
        for layer in range(12)
        for name, shape in enumerate([(64, 192), (64, 64), (64, 256), (256, 64)])
    ]
    for ranks in (2, 3, 5, 8):
        owners = ownership(
            trained, range(len(trained)), ranks, None, lambda p: float(p.numel() * min(p.shape))
        )
        held = [0] * ranks
        for number, rank in owners.owner_of.items():
            held[rank] += trained[number][1].numel()
        assert max(held) <= 1.1 * sum(held) / ranks
        members = [number for bucket in owners.buckets for number in bucket.members]
        assert sorted(members) == list(range(len(trained)))


def _over_gloo(group, kind):
    weights, reports, (_, state), _ = _trained(kind, group, shard_optimizer=True)
    counts = (group.counters.collectives, group.transport_collectives(), reports[-1].collectives)
    return weights.tolist(), _plain(state), counts


def _plain(value):
    """Return a state with lists for tensors, which can be sent between processes."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(held) for key, held in value.items()}
    return [_plain(held) for held in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", ["muon", "mixed", "shampoo"])
def test_real_processes_take_the_same_steps(kind, tmp_path):
    wanted, _, (_, state), _ = _trained(kind, TorchGroup.alone())
    results = run_ranks(3, tmp_path, _over_gloo, kind)
    for weights, _, (counted, of_transport, each) in results:
        assert weights == pytest.approx(wanted.tolist(), rel=1e-12, abs=1e-14)
        assert counted == of_transport
        assert each > 0
    for values, of_one in zip(
        results[0][1]["state"].values(), _plain(state)["state"].values(), strict=True
    ):
        assert list(values) == list(of_one)
        for key, value in of_one.items():
            torch.testing.assert_close(values[key], value, rtol=1e-9, atol=1e-12)


def _refused(optimizer_of, message, **options):
    net = Net()
    with pytest.raises(ConfigError, match=message):
        Accumulator(net, optimizer_of(net), TorchGroup.alone(), **options)


def test_what_is_not_known_or_cannot_be_is_refused():
    sharded = {"shard_optimizer": True}
    _refused(
        lambda net: Lamb(net.parameters()),
        r"does not know .*Lamb; .*shard_by='parameters'",
        **sharded,
    )
    _refused(
        lambda net: optim.AdamW(net.parameters()),
        r"no engine\.shard_by=parameter; did you",
        shard_by="parameter",
        **sharded,
    )

    def misnamed(net):
        return optim.AdamW([{"params": list(net.parameters()), "shard_by": "rows"}])

    _refused(misnamed, "'elements' or 'parameters', but is 'rows'", **sharded)

    def cut(net):
        optimizer = optim.Adafactor(net.parameters())
        optimizer.param_groups[0]["shard_by"] = "elements"
        return optimizer

    _refused(cut, "Adafactor needs whole parameters", **sharded)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_zeros_optimizer_is_refused_with_ours(tmp_path):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # it warns

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/met", rank=0, world_size=1
    )
    try:
        _refused(
            lambda net: ZeroRedundancyOptimizer(net.parameters(), optim.Adam),
            r"ZeroRedundancyOptimizer, whose step .*engine\.shard_optimizer=true",
        )
    finally:
        torch.distributed.destroy_process_group()
