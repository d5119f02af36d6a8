"""Warnings of any rank are printed and recorded; ranks that compute differently are named."""

import json
import os

import pytest
import torch

from orchestrator import Loss
from orchestrator.rundir.warnings import warn
from tests.helpers import LIGHT, SMALL, call
from tests.tiny_job import Tiny

pytestmark = pytest.mark.whole_runs

WARNING = "job._target_=tests.end_to_end.test_warnings.Warns"


class Warns(Tiny):
    """Rank 1 warns before training and at each micro-step, where its metrics are no numbers, and
    computes with more threads; rank 0 warns in its last evaluation.
    """

    def model(self):
        if os.environ["SLURM_PROCID"] == "1":
            warn("made before training")
            torch.set_num_threads(2)
        return super().model()

    def loss(self, model, batch):
        if os.environ["SLURM_PROCID"] == "1":
            warn(f"made in micro-step {self.steps}", kind="made in mid-training")
            found = super().loss(model, batch)
            return Loss(found.total, found.weight, {"error": float("nan")})
        return super().loss(model, batch)

    def evaluate(self, model):
        warn("made at the end")
        return super().evaluate(model)


def written(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [sentence for line in lines for sentence in line.get("warnings", ())]


def test_a_warning_of_any_rank_is_on_the_terminal_and_in_the_metrics(run):
    done = call(
        WARNING,
        SMALL,
        f"run.dir={run}",
        "tracker=none",
        "train.updates=6",
        "train.checkpoint_every=3",
        "train.evaluate_every=0",
        "accumulation.reduction=reproducible",
        "accumulation.micro_batch=16",
        "accumulation.global_batch=160",
        code=0,
    )
    for said in (
        " ".join(done.stdout.split()),
        "\n".join(f"warning: {sentence}" for sentence in written(run)),
    ):
        assert said.count("warning: rank 1: made before training") == 1
        assert said.count("warning: rank 1: made in micro-step") == 1
        assert said.count("warning: made at the end") == 1
        assert said.count("warning: metric 'error' is nan in update 0: a sum in Loss.metrics") == 1
        assert said.count("learning rate is scaled") <= 1
        assert said.count("rank 1 computes with another version of torch, number of threads") == 1


def test_unreadable_repository_has_no_known_commit(run):
    done = call(
        LIGHT,
        SMALL,
        f"run.dir={run}",
        "tracker=none",
        "train.updates=1",
        GIT_TEST_ASSUME_DIFFERENT_OWNER="1",
        code=0,
    )
    for said in (" ".join(done.stdout.split()), "\n".join(written(run))):
        assert "git config --global --add safe.directory" in said
