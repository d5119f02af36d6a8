"""Lightning, Accelerate and the Trainer: unmodified in a run, and with our callbacks."""

import pytest

from tests import helpers
from tests.client.scripts import NAMES, PLAIN, TOLD, log, under_torchrun
from tests.programs import script


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The three as they are, on two nodes of one rank: the run that ends with rank 1's error, and
    what two ranks of torchrun printed.

    Four ranks would import three frameworks each to prove no more: that ranks of one node get
    torchrun's variables is tested in tests/end_to_end/test_programs.py.
    """
    folder = tmp_path_factory.mktemp("plain")
    script(folder, PLAIN)
    failed = helpers.call(
        "run", helpers.SMALL, f"run.dir={folder / 'run'}", "--", "train.py", "--die",
        module="orchestrator", cwd=folder, timeout=390,
    )  # fmt: skip
    assert failed.returncode == 1, failed.stdout + failed.stderr
    printed = under_torchrun(folder)
    return folder / "run", TOLD.findall(printed)


@pytest.mark.timeout(800)
def test_unmodified_they_end_with_the_losses_that_they_have_under_torchrun(plain):
    run, theirs = plain
    assert {(how, name) for how, name, *_ in theirs} == {
        (how, name) for how in ("final", "called") for name in NAMES
    }
    ours = [ending for rank in range(2) for ending in TOLD.findall(log(run, rank))]
    assert len(ours) == 12
    assert sorted(ours) == sorted(theirs)


def test_with_callbacks_they_call_no_collective_more_and_end_with_the_same_loss(plain):
    """In a run and, where the same lines do nothing, under torchrun."""
    run, theirs = plain
    for reports in (*(TOLD.findall(log(run, rank)) for rank in range(2)), theirs):
        ends = {how: sorted(rest for kind, *rest in reports if kind == how) for how, *_ in reports}
        assert ends["called"] == ends["final"]
        assert all(int(collectives) > 0 for *_, collectives in ends["final"])


def test_a_rank_that_fails_in_a_framework_is_named_with_its_exception(plain):
    run, _ = plain
    found = helpers.result(run)["culprit"]
    assert found["rank"] == 1
    assert found["cause"].startswith("ValueError: the trainer's rank 1 has no such word")
