"""The digest of the reduced gradient: a function of its bits alone."""

import random

import pytest
import torch

from orchestrator import Accumulator, Loss, run_in_threads
from orchestrator.engine.torch.gradient_digest import gradient_digest

SIZES = (1, 2, 3, 4095, 8191, 8192, 8193, 20_001)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_one_flipped_bit_always_changes_it(size, dtype):
    flat = torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(size))
    digest, chosen = gradient_digest([flat]), random.Random(size)
    assert digest == gradient_digest([flat.clone()])
    kind, bits = (torch.int32, 32) if dtype == torch.float32 else (torch.int64, 64)
    for _ in range(50):
        other = flat.clone()
        bit = chosen.randrange(bits)
        flip = -(1 << bit) if bit == bits - 1 else 1 << bit
        other.view(kind)[chosen.randrange(size)] ^= flip
        assert gradient_digest([other]) != digest


def test_exchanged_numbers_and_buffers_have_another_digest():
    flat = torch.arange(1.0, 10_001.0)
    for a, b in ((0, 2), (0, 8192), (1, 9_999), (8193, 8195)):
        other = flat.clone()
        other[[a, b]] = other[[b, a]]
        assert gradient_digest([other]) != gradient_digest([flat])
    first, second = flat[:5000].clone(), flat[5000:].clone()
    assert gradient_digest([first, second]) != gradient_digest([second, first])
    assert gradient_digest([torch.tensor([0.0, 1.0])]) != gradient_digest([torch.tensor([-0.0, 1])])
    assert gradient_digest([torch.zeros(5)]) == "0" * 16


def digests(group, reduction="reproducible"):
    """Train three updates of 7 leaves; return each one's digest and the final weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))
    ours = Accumulator(
        model,
        torch.optim.AdamW(model.parameters(), 0.1),
        group,
        reduction=reduction,
        clip_norm=0.1,
    )
    x = torch.randn(3, 14, 5, generator=torch.Generator().manual_seed(1))
    found = []
    cuts = [number * 7 // group.size for number in range(group.size + 1)]
    for update in range(3):
        ours.begin_window(leaves=7 if reduction == "reproducible" else None)
        for leaf in range(cuts[group.rank], cuts[group.rank + 1]):
            total = (model(x[update, 2 * leaf : 2 * leaf + 2]) ** 2).sum()
            ours.backward(Loss(total, weight=2), leaf=leaf if reduction != "fast" else None)
        found.append(ours.boundary().gradient_digest)
    return found, [parameter.detach().clone() for parameter in model.parameters()]


def test_it_is_the_same_on_any_number_of_ranks():
    expected, weights = run_in_threads(1, digests)[0]
    assert len(set(expected)) == 3
    for ranks in (2, 3, 5, 8):
        for found, others in run_in_threads(ranks, digests):
            assert found == expected
            assert all(map(torch.equal, others, weights))


def test_the_fast_reduction_has_none():
    [(found, _)] = run_in_threads(1, lambda group: digests(group, "fast"))
    assert found == [None] * 3
