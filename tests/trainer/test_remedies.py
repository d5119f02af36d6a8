"""Errors that a job brings from another loop are told with what to do about them here."""

import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

from orchestrator.errors import JobError
from orchestrator.trainer.failure import describe


def _backward_twice():
    total = torch.ones(2, requires_grad=True).square().sum()
    total.backward()
    total.backward()


def _no_deterministic_kernel():
    torch.use_deterministic_algorithms(True)
    try:
        torch.ones(2).put_(torch.zeros(1, dtype=torch.int64), torch.ones(1))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("slip", "words"),
    [
        (dist.get_rank, "a job needs neither torch.distributed nor DistributedDataParallel"),
        (lambda: dist.init_process_group("gloo"), "leave init_process_group() out"),
        (_backward_twice, "leave loss.backward() out"),
        (_no_deterministic_kernel, "use another operation there, or accumulation.reduction=fast"),
        (lambda: torch.ones(1, device="meta").to("cpu"), "model() must give a model with numbers"),
        (lambda: sys.exit(0), "something in the job ended the process"),
        (lambda: torch.empty(2**60), "more accumulation.steps make the micro-batches smaller"),
        (lambda: np.empty(2**58), "more accumulation.steps make the micro-batches smaller"),
    ],
)
def test_what_torch_says_of_a_habit_is_told_with_the_way_out(slip, words, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises((ValueError, RuntimeError, MemoryError, SystemExit)) as found:
        slip()
    assert words in describe(found.value)


def test_other_errors_stay_as_they_are():
    assert describe(ValueError("what")) == "ValueError: what"
    assert describe(KeyError()) == "KeyError"
    assert describe(JobError("one\ntwo")) == "one\ntwo"


def test_of_an_error_of_many_lines_the_cause_has_the_first():
    with pytest.raises(TypeError) as found:
        torch.conv2d(1, 2)
    [line] = describe(found.value).splitlines()
    assert line.startswith("TypeError: conv2d() received an invalid combination of arguments")
    assert "but expected one of, at " in line
