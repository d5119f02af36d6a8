"""The annealed loss of the variational autoencoder is the same for every split."""

import pytest

from tests.helpers import call, records, result

COMMON = (
    "job=vae",
    "job.samples=300",
    "job.held_out=30",
    "job.annealing_updates=4",
    "cluster.nodes=1",
    "accumulation.global_batch=50",
    "train.epochs=null",
    "train.updates=8",
    "train.precision=float64",
    "tracker=none",
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Return the folder of a run of one rank and one micro-step."""
    run = tmp_path_factory.mktemp("vae") / "run"
    shape = ("cluster.ranks_per_node=1", "accumulation.steps=1")
    call(*COMMON, *shape, f"run.dir={run}", code=0)
    return run


@pytest.mark.parametrize(("ranks", "steps"), [(1, 4), (2, 1), (2, 4)])
def test_losses_do_not_depend_on_ranks_and_micro_steps(run, reference, ranks, steps):
    shape = (f"cluster.ranks_per_node={ranks}", f"accumulation.steps={steps}")
    call(*COMMON, *shape, f"run.dir={run}", code=0)
    for ours, expected in zip(records(run), records(reference), strict=True):
        assert ours["loss"] == pytest.approx(expected["loss"], rel=1e-12)
        assert ours["metrics"] == pytest.approx(expected["metrics"], rel=1e-12)
    assert result(run)["metrics"] == pytest.approx(result(reference)["metrics"], rel=1e-12)


def test_the_weight_of_the_kl_term_follows_the_update(reference):
    for line in records(reference):
        reconstruction, kl = line["metrics"]["reconstruction"], line["metrics"]["kl"]
        weight = min(1, line["update"] / 4)
        assert line["loss"] == pytest.approx(reconstruction + weight * kl, rel=1e-12)
    assert kl > 0
    figures = result(reference)["metrics"]
    assert figures["loss"] == pytest.approx(figures["reconstruction"] + figures["kl"], rel=1e-12)
