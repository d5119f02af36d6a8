"""A hundred flipped bits: which a record shows, and that the others change no update.

In one process: in reproducible mode the leaves and their sums are those of any number of ranks.
"""

import random
from dataclasses import replace

import pytest
import torch

from orchestrator import current_run
from orchestrator.engine.torch.reproducible import middle
from orchestrator.plan.order import DataOrder
from tests.engine.torch.jobs import engine_of
from tests.engine.windows import make_window
from tests.replay.jobs import Flipped

UPDATES, LEAVES, SIZE = 8, 6, 4
PARAMETERS = ["0.weight", "0.bias", "3.weight", "3.bias"]
ORDER = DataOrder(dataset_samples=240, global_batch=LEAVES * SIZE)


def window_of(update):
    """Return an update's window of all leaves, in the order of a run's samples."""
    window = make_window(update, [(SIZE * leaf, SIZE) for leaf in range(LEAVES)], rate=1e-3)
    indices = ORDER.indices(update).tolist()
    leaves = (
        replace(leaf, indices=tuple(indices[leaf.start : leaf.start + SIZE]))
        for leaf in window.micro_batches
    )
    return replace(window, micro_batches=tuple(leaves))


def train(updates, flip=None):
    """Return of each update the leaves' gradients by parameter, and the digest of their sum."""
    settings = {"reduction": "reproducible", "optimizer": {"name": "adam"}}
    engine = engine_of(Flipped(flip=flip), metric_names=("error",), **settings)
    windows = [window_of(update) for update in range(updates)]
    batches = engine.batches(leaf for window in windows for leaf in window.micro_batches)
    found = []
    for window in windows:
        current_run.set_update(window.update, 0)
        engine.begin_window(window)
        leaves = []
        for leaf in window.micro_batches:
            engine.micro_step(next(batches), leaf)
            leaves.append({name: value.clone() for name, value in engine.gradients().items()})
        found.append((leaves, engine.boundary().gradient_digest))
    return found


def tree_sum(leaves, first=0, last=LEAVES):
    """Return the sum of a parameter's gradients, in the order of reproducible mode."""
    if last - first == 1:
        return leaves[first]
    split = middle(first, last)
    return tree_sum(leaves, first, split) + tree_sum(leaves, split, last)


def same_bits(one, other):
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.fixture(scope="module")
def right():
    """Return what `train` does without a flip; until the module's end this is rank 0 of a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_PROCID", "0")
        for name in ("_update", "_epoch"):  # have them restored
            patch.setattr(current_run, name, getattr(current_run, name))
        yield train(UPDATES)


@pytest.mark.parametrize("tenth", range(10))
def test_a_flipped_bit_shows_in_its_update_unless_the_sum_rounds_it_away(right, tenth):
    for seed in range(10 * tenth, 10 * tenth + 10):
        chosen = random.Random(seed)
        update, bit = chosen.randrange(UPDATES), chosen.randrange(23)
        parameter, position = chosen.choice(PARAMETERS), chosen.randrange(LEAVES * SIZE)
        sample = int(ORDER.indices(update)[position])
        found = train(update + 1, [update, sample, parameter, bit])
        assert [digest for _, digest in found[:-1]] == [digest for _, digest in right[:update]]
        (leaves, digest), (expected, its_digest) = found[-1], right[update]
        assert [
            (number, name)
            for number in range(LEAVES)
            for name in PARAMETERS
            if not same_bits(leaves[number][name], expected[number][name])
        ] == [(position // SIZE, parameter)]
        sums = [tree_sum([leaf[parameter] for leaf in each]) for each in (leaves, expected)]
        assert (digest == its_digest) == same_bits(*sums)
