"""The target encoder follows once an update; a resumed run goes on.

That the split changes nothing: tests/engine/torch/test_sharding.py.
"""

import pytest
import torch

from jobs.jepa import PATCHES, Jepa, patches_of
from tests.engine.torch.jobs import engine_of
from tests.engine.windows import run
from tests.jobs.training import train, windows
from tests.laws.problem import difference

OWN = {"optimizer": {}}  # Jepa builds its own
SMALL = {"width": 16, "layers": 1, "horizon": 6}
# Adam divides by a root that can be tiny, which magnifies the last bits.
TOLERANCE = 1e-8


def test_the_target_is_the_moving_average_of_the_context_once_an_update():
    job = Jepa(**SMALL)
    (start, *_), *_ = train(job, 1, samples=8, updates=0, cap=2, **OWN)
    wanted = {n: t for n, t in start.items() if n.startswith("target.")}
    for updates in (1, 2, 3):
        (found, *_), *_ = train(Jepa(**SMALL), 1, samples=8, updates=updates, cap=2, **OWN)
        momentum = job.scheduled(job.momentum, updates - 1)
        for name, before in wanted.items():
            context = found["context." + name.removeprefix("target.")]
            wanted[name] = momentum * before + (1 - momentum) * context
    assert difference({name: found[name] for name in wanted}, wanted) <= TOLERANCE


def test_a_resumed_run_has_the_bits_of_one_that_went_through(tmp_path):
    def go_on(engine, first, last):
        run(engine, list(windows(0, 1, samples=8, updates=last, cap=4))[first:])

    through, stopped, resumed = (engine_of(Jepa(**SMALL), **OWN) for _ in range(3))
    go_on(through, 0, 4)
    go_on(stopped, 0, 2)
    extra = stopped.save_state(tmp_path)
    resumed.load_state(tmp_path, extra)
    go_on(resumed, 2, 4)
    assert resumed.weights_sha256() == through.weights_sha256()


def test_schedules_go_along_half_a_cosine_and_stay_at_their_end():
    job = Jepa(momentum=(0.9, 1.0), horizon=10)
    values = [job.scheduled(job.momentum, update) for update in range(13)]
    assert values[0] == pytest.approx(0.9)
    assert values[5] == pytest.approx(0.95)
    assert values[10:] == [1.0, 1.0, 1.0]
    assert values == sorted(values)


def test_weight_decay_rises_with_the_updates_for_matrices_only():
    job = Jepa(**SMALL)
    (*_, engine), *_ = train(job, 1, samples=8, updates=3, cap=4, **OWN)
    matrices, vectors = engine.accumulator.optimizer.param_groups
    assert matrices["weight_decay"] == pytest.approx(job.scheduled(job.weight_decay, 3))
    assert vectors["weight_decay"] == 0.0


def test_patches_are_squares_of_the_picture():
    image = torch.arange(784.0).view(1, 28, 28)
    patches = patches_of(image.view(1, 784))
    assert patches.shape == (1, PATCHES, 49)
    assert torch.equal(patches[0, 5].view(7, 7), image[0, 7:14, 7:14])
