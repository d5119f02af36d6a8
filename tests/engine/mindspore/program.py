"""One rank of a test's group: `python -m tests.engine.mindspore.program FOLDER RANK SIZE`.

Starting a group takes seconds, so one group goes through all checks; each leaves "" or a traceback
in the rank's JSON file, and the tests look there.
"""

import json
import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

os.environ.setdefault("GLOG_v", "3")

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from orchestrator.engine.api import EngineSettings, GroupSpec
from orchestrator.engine.common.update_policy import FIRST_SCALE
from orchestrator.engine.conformance import CHECKS
from orchestrator.engine.mindspore.engine import build_engine
from orchestrator.engine.mindspore.group import AllGather, AllReduceMean, AllReduceSum, form_group
from orchestrator.errors import JobError, NonFiniteError, ReplicasDiffer, SilenceError
from orchestrator.plan.split import assign, even_parts
from orchestrator.plan.wire import Wire
from tests.engine.mindspore.jobs import SAMPLES, Drifting, Light, Steep, Weighted, numpy_update
from tests.engine.windows import run, window_of
from tests.refusals import mentions, refused

RATE = 0.05


class Arrays:
    def make(self, values, shape):
        return Tensor(np.asarray(values, np.float32).reshape(shape))

    def read(self, tensor):
        return tensor.asnumpy().ravel().tolist()


# ---------------------------------------------------------------------- adjoints


def _adjoint(group, cell, shape, compiled, dtype=np.float32):
    """sum_r <A x_r, u_r> = sum_r <x_r, A* u_r>, and inputs are left alone."""
    draw = np.random.default_rng(group.rank)
    x = Tensor(draw.standard_normal(shape).astype(dtype))
    y_shape = cell(x).shape
    u = Tensor(draw.standard_normal(y_shape).astype(dtype))
    kept = x.asnumpy().copy(), u.asnumpy().copy()

    def inner(x):
        return (cell(x) * u).sum()

    def both(x):
        return ms.grad(inner)(x)

    back = (ms.jit(both) if compiled else both)(x)
    left = float((cell(x) * u).sum().asnumpy())
    right = float((x * back).sum().asnumpy())
    lefts, rights = (sum(row[0] for row in _gather(group, v)) for v in (left, right))
    assert abs(lefts - rights) < 1e-4 * max(1.0, abs(lefts)), (lefts, rights)
    assert (kept[0] == x.asnumpy()).all()
    assert (kept[1] == u.asnumpy()).all()


def _gather(group, value):
    return group.all_gather(Tensor(np.asarray([[value]], np.float64))).asnumpy().tolist()


def adjoints(compiled):
    def check(group):
        even, uneven = [2] * group.size, [r + 1 for r in range(group.size)]
        _adjoint(group, AllReduceSum(group), (3, 2), compiled)
        _adjoint(group, AllReduceMean(group), (4,), compiled)
        _adjoint(group, AllGather(group, even), (2, 3), compiled)
        _adjoint(group, AllGather(group, uneven), (uneven[group.rank], 3), compiled)
        with refused(TypeError, "MCCL float64 float32"):
            _adjoint(group, AllReduceSum(group), (3,), compiled, np.float64)

    return check


def wide_numbers_keep_their_digits(group):
    every = [np.random.default_rng(rank).standard_normal((2, 2)) for rank in range(group.size)]
    mine = Tensor(every[group.rank])
    turned = Tensor((every[group.rank] * (1 + 2j)).astype(np.complex64))
    wanted = (np.concatenate(every) * (1 + 2j)).astype(np.complex64)
    assert (group.all_gather(turned).asnumpy() == wanted).all()
    large = Tensor(np.asarray([2**53 + group.rank]))
    assert group.all_gather(large).asnumpy().tolist() == [2**53 + r for r in range(group.size)]
    assert (group.all_gather(mine).asnumpy() == np.concatenate(every)).all()
    copy = mine.copy()
    group.broadcast(copy, group.size - 1)
    assert (copy.asnumpy() == every[-1]).all()


# ---------------------------------------------------------------------- the engine


def _updates(group, *, updates=1, steps=3, lopsided=False, job=None, stop=False, **settings):
    """Train on all samples; lopsided: rank 0 has none."""
    job = job or Weighted()
    settings = {"metric_names": job.metric_names, **settings}
    engine = build_engine(job, EngineSettings(**settings), group)
    before = [p.asnumpy().copy() for p in engine._model.trainable_params()]
    idle = [0] if lopsided else []
    split = assign([*idle, *even_parts(SAMPLES, group.size - len(idle))], steps=steps)
    windows = [window_of(split, group.rank, update, rate=RATE) for update in range(updates)]
    report = run(engine, windows, stop=stop)[-1]
    after = [p.asnumpy().copy() for p in engine._model.trainable_params()]
    return engine, report, before, after


def _distance(found, wanted):
    a, b = (np.concatenate([np.asarray(w).ravel() for w in ws]) for ws in (found, wanted))
    return float(np.abs(a - b).max() / np.abs(b).max())


def update_is_numpys_big_batch(group, **settings):
    """And what it sent is what the plan says."""
    engine, report, before, after = _updates(group, **settings)
    assert _distance(after, numpy_update(before, RATE)) < 1e-6
    facts = {"itemsize": 4, "metric_count": 1, "ranks": group.size}
    bucket = {name: settings[name] for name in settings if name == "bucket_bytes"}
    count = engine.parameter_count()
    assert report.collectives == Wire(**bucket, **facts).collectives(count)
    wanted = Wire(**facts).bytes_sent(count)
    assert abs(report.bytes_on_wire - wanted) <= 1, (report.bytes_on_wire, wanted)


def update_is_numpys_big_batch_in_float64_though_a_rank_has_no_samples(group):
    _, report, before, after = _updates(group, precision="float64", lopsided=True)
    assert _distance(after, numpy_update(before, RATE)) < 1e-12
    assert report.micro_steps == (0 if group.rank == 0 else 3)


def many_buckets_are_as_planned(group):
    update_is_numpys_big_batch(group, bucket_bytes=100, mode="pynative")


def small_weights_count_as_exactly_as_large_ones(group):
    update_is_numpys_big_batch(group, job=Light(), mode="pynative")


def a_stop_of_one_is_known_to_all(group):
    last = group.size - 1
    _, report, *_ = _updates(group, stop=group.rank == last, mode="pynative")
    assert report.stop_requested


def nan_stops_all_ranks_and_names_the_place(group):
    with refused(NonFiniteError, "rank 0 micro-step 0"):
        _updates(group, job=Weighted(poison=0), mode="pynative")


def float16_is_near_and_not_at_float32(group):
    _, report, before, after = _updates(group, precision="float16", mode="pynative")
    assert report.applied
    assert report.loss_scale == FIRST_SCALE
    assert 1e-6 < _distance(after, numpy_update(before, RATE)) < 1e-3


def an_overflow_on_one_rank_is_skipped_by_all(group):
    """Only rank 0 has the steep sample. The scale falls until the window can be applied."""
    job = Steep()
    engine, report, before, after = _updates(group, job=job, precision="float16", updates=8)
    assert report.applied
    assert 1 < report.loss_scale < FIRST_SCALE
    assert _distance(after, before) > 0
    assert job.followed[0] > 0
    assert job.followed[-1] == 7
    for figure in (report.loss_scale, float(int(engine.weights_sha256()[:12], 16))):
        assert len({row[0] for row in _gather(group, figure)}) == 1


def a_collective_in_mid_window_is_refused(group):
    group.silence = "in mid-window of a test"
    with pytest.raises(SilenceError):
        group.barrier()
    group.silence = None


class Unequal(Weighted):
    def model(self):
        net = super().model()
        rank = int(os.environ["TEST_RANK"])
        net[0].bias.set_data(Tensor(np.full(7, rank, np.float32)))
        return net


def unequal_models_are_refused(group):
    with refused(JobError, "model() ranks 1 rank 0"):
        build_engine(Unequal(), EngineSettings(metric_names=("error",)), group)


def a_rank_that_drifts_from_the_others_is_named(group):
    with pytest.raises(ReplicasDiffer) as caught:
        _updates(group, updates=3, job=Drifting(), mode="pynative")
    group.silence = None
    assert mentions(str(caught.value), "rank 1 update 1 update 2"), str(caught.value)


def no_other_thread_spins_while_one_computes(group):
    """After all that was computed above, in pynative mode as well."""
    del group
    ticks = Counter()
    for stat in Path("/proc/self/task").glob("*/stat"):
        name, _, fields = stat.read_text().partition("(")[2].rpartition(")")
        ticks[name] += int(fields.split()[11]) + int(fields.split()[12])
    queues = sum(spent for name, spent in ticks.items() if name.endswith("_queue"))
    assert queues < ticks.total() / 20, ticks


OWN = (
    wide_numbers_keep_their_digits,
    update_is_numpys_big_batch,
    update_is_numpys_big_batch_in_float64_though_a_rank_has_no_samples,
    many_buckets_are_as_planned,
    small_weights_count_as_exactly_as_large_ones,
    a_stop_of_one_is_known_to_all,
    nan_stops_all_ranks_and_names_the_place,
    float16_is_near_and_not_at_float32,
    an_overflow_on_one_rank_is_skipped_by_all,
    a_collective_in_mid_window_is_refused,
    unequal_models_are_refused,
    a_rank_that_drifts_from_the_others_is_named,
    no_other_thread_spins_while_one_computes,
)


def checks():
    found = {c.__name__: (lambda group, c=c: c(group, Arrays())) for c in CHECKS}
    found["adjoints_in_pynative"] = adjoints(compiled=False)
    found["adjoints_under_jit"] = adjoints(compiled=True)
    found.update({c.__name__: c for c in OWN})
    return found


def spec(folder, rank, size, **more):
    given = {"address": f"127.0.1.{1 + rank}", "timeout_s": 120.0, **more}
    return GroupSpec(
        rank=rank, size=size, local_rank=rank, node=f"node{rank}", folder=Path(folder), **given
    )


def main():
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.environ["TEST_RANK"] = str(rank)
    group = form_group(spec(folder, rank, size))
    scheduler = group._scheduler.process.pid if group._scheduler else None
    report = {}
    for name, check in checks().items():
        try:
            check(group)
            report[name] = ""
        except Exception:  # noqa: BLE001  # reported by the test
            report[name] = traceback.format_exc()
        print(name, report[name][-200:], flush=True)  # shown where a later one hangs
    began = time.perf_counter()
    group.close()
    report["close_s"] = time.perf_counter() - began
    report["scheduler"] = scheduler
    (folder / f"report-{rank}.json").write_text(json.dumps(report))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
