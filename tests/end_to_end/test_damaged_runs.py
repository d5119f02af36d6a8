"""Damaged runs are resumed from intact files, or refused."""

import shutil

import pytest

from tests.helpers import SMALL, TINY, call, contents, result, verb

pytestmark = pytest.mark.whole_runs

SHAPE = (
    TINY,
    SMALL,
    "tracker=none",
    "accumulation.global_batch=40",
    "accumulation.steps=2",
    "train.updates=12",
    "train.checkpoint_every=4",
    "run.survive=false",
)


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory):
    """Left after update 9 of 12, with checkpoints after 8 and, since a rank was killed, 9."""
    run = tmp_path_factory.mktemp("damaged") / "run"
    call(*SHAPE, "job.fault=kill", "job.fault_after=19", f"run.dir={run}", code=1)
    return run


def flip(path, find):
    content = path.read_bytes()
    assert find in content
    path.write_bytes(content.replace(find, bytes([find[0] ^ 1]) + find[1:], 1))


def test_damaged_newest_checkpoint_costs_no_bit(broken_off, tmp_path):
    whole = shutil.copytree(broken_off, tmp_path / "whole")
    assert verb("resume", whole, "-q", code=0).stdout == "", "-q"
    run = shutil.copytree(broken_off, tmp_path / "run")
    flip(run / "checkpoints" / "update-000000009" / "state.json", b"0.999")
    done = verb("resume", run, code=0)
    said = " ".join((done.stdout + done.stderr).split())
    assert "state.json is damaged" in said
    assert "going on from an earlier checkpoint" in said
    assert "going on from an earlier checkpoint" in (run / "metrics.jsonl").read_text()
    assert result(run)["weights_sha256"] == result(whole)["weights_sha256"]


def test_where_every_checkpoint_is_damaged_nothing_starts_and_nothing_is_touched(
    broken_off, tmp_path
):
    run = shutil.copytree(broken_off, tmp_path / "run")
    for weights in run.glob("checkpoints/*/weights.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-1])
    before = contents(run)
    done = verb("resume", run, code=2)
    assert "no checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
    assert contents(run) == before
