"""Errors that a job brings from another loop are told with what to do about them here."""

import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

from orchestrator.errors import JobError
from orchestrator.trainer.failure import describe, short_traceback


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
        (lambda: torch.nn.Linear(2, 2)(torch.ones(1, 2).half()), "as in x.float()"),
        (lambda: torch.nn.Linear(2, 2)(torch.ones(1, 2).double()), "as in x.float()"),
        (lambda: torch.nn.Conv1d(1, 1, 1)(torch.ones(1, 1, 2).bfloat16()), "as in x.float()"),
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


def test_calls_of_torch_leave_the_job_s_line_at_the_end_of_the_log():
    layers = [torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(3)]
    model = torch.nn.Sequential(torch.nn.Sequential(*layers))

    def loss():
        try:
            model(torch.ones(1, 3))  # the job's line
        except RuntimeError as error:
            raise RuntimeError("the job's own") from error

    with pytest.raises(RuntimeError) as found:
        loss()
    text = short_traceback(found.value)
    cause, after = text.split("The above exception was the direct cause", 1)
    lines = cause.rstrip().splitlines()
    assert any("# the job's line" in line for line in lines[-10:])
    assert any("calls within packages" in line for line in lines)
    assert "linear.py" in cause
    assert lines[-1].startswith("RuntimeError: mat1 and mat2 shapes")
    assert after.rstrip().endswith("RuntimeError: the job's own")


def test_mindspore_errors_of_two_number_formats():
    same = "For 'MatMul', the type of 'x2' should be same as 'x1', but got 'x1' with type "
    both = TypeError(f"{same}Tensor[Float16] and 'x2' with type Tensor[Float32].")
    assert "mindspore.float32" in describe(both)
    allowed = "For 'Cos', the type of 'x' must be of Tensor[Float16], Tensor[Float32], but got"
    assert "float32)" not in describe(TypeError(f"{allowed} Tensor[Int64]."))


def test_an_error_of_one_number_format_gets_no_advice_about_two():
    scores, labels = torch.ones(1, 2), torch.zeros(1, dtype=torch.int16)
    with pytest.raises(RuntimeError) as found:
        torch.nn.functional.cross_entropy(scores, labels)
    assert "x.float()" not in describe(found.value)


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
