"""GPT-2 of `transformers` has the same weights on one rank and on two, with samples of lengths."""

import json
import sys

import pytest

from jobs.gpt2 import END, GPT2, PADDING
from orchestrator import JobError
from orchestrator.trainer.job_class import build_job
from tests.helpers import call, compare, records, result

COMMON = (
    "job=gpt2",
    "job.width=16",
    "job.heads=2",
    "job.samples=200",
    "job.held_out=30",
    "accumulation.global_batch=40",
    "accumulation.micro_tokens=120",
    "train.epochs=null",
    "train.updates=8",
    "cluster.nodes=1",
    "tracker=none",
)


def start(run, ranks, *overrides):
    call(*COMMON, f"cluster.ranks_per_node={ranks}", f"run.dir={run}", *overrides, code=0)
    return run


def test_two_ranks_have_the_weights_and_figures_of_one(tmp_path):
    alone, pair = (start(tmp_path / f"{n}", n, "train.precision=float64") for n in (1, 2))
    assert compare(alone, pair)["max_relative_difference"] <= 1e-12
    for ours, expected in zip(records(pair), records(alone), strict=True):
        assert ours["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    figures = result(pair)["metrics"]
    assert figures == pytest.approx(result(alone)["metrics"], rel=1e-12)
    assert figures["loss"] < records(pair)[0]["loss"]
    assert json.loads((pair / "plan.json").read_text())["micro_tokens"] == 120


def test_in_reproducible_mode_two_ranks_have_the_bits_of_one_with_dropout(tmp_path):
    mode = ("accumulation.reduction=reproducible", "job.dropout=0.1")
    digests = {result(start(tmp_path / f"{n}", n, *mode))["weights_sha256"] for n in (1, 2)}
    assert len(digests) == 1


def test_texts_are_sorted_letters_padded_at_the_end():
    job = GPT2(letters=5, samples=20)
    data = job.dataset()
    texts = [bytes(data[index].tolist()) for index in range(20)]
    assert [len(text) for text in texts] == data.lengths
    for text in texts:
        letters, answer = text.split(b"=")
        assert answer == bytes(sorted(letters)) + b"\n"
    short, long = min(data, key=len), max(data, key=len)
    inputs, targets = job.collate([short, long])
    assert inputs[:, 0].tolist() == [END, END]
    assert inputs[1, 1:].tolist() == long[:-1].tolist()
    assert targets[0].tolist() == [*short.tolist(), *[PADDING] * (len(long) - len(short))]


def test_missing_transformers(monkeypatch):
    monkeypatch.delitem(sys.modules, "orchestrator.jobs.gpt2", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)  # its import fails
    with pytest.raises(JobError, match=r"job=gpt2: .*pip install 'transformers>=5'"):
        build_job({"_target_": "orchestrator.jobs.gpt2.GPT2"})
