"""Where two runs part: by their records, and by a replay of both."""

import json
import random

import pytest

from orchestrator.client.loop import CompletedUpdate, update_line
from orchestrator.engine.api import BoundaryReport
from orchestrator.plan.order import DataOrder
from orchestrator.plan.window import Window
from orchestrator.replay.bisecting import Bisection, compare_records, differences_of
from orchestrator.replay.printing import print_bisection
from orchestrator.replay.replaying import _unrepeated
from orchestrator.rundir.environments import NOT_RECORDED
from orchestrator.rundir.files import write_json
from tests.docs.json_fields import Fields
from tests.helpers import call, verb
from tests.run_folders import Screen, make_run, record

pytestmark = pytest.mark.whole_runs

COMMON = (
    "train.evaluate_every=0",
    "train.checkpoint_every=3",
    "train.keep_checkpoints=20",
    "tracker=none",
    "accumulation.global_batch=24",
    "accumulation.steps=null",
    "train.updates=8",
    "accumulation.micro_batch=4",
    "accumulation.reduction=reproducible",
    "cluster.nodes=1",
)
FLIPPED = "job._target_=tests.replay.jobs.Flipped"
NAMES = ["0.weight", "0.bias", "3.weight", "3.bias"]


def bisect(a, b, *words, code=1):
    report = json.loads(verb("bisect", a, b, *words, "--json", code=code).stdout)
    Fields("bisect").check(report)
    return report


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    run = tmp_path_factory.mktemp("plain") / "run"
    call(FLIPPED, *COMMON, "cluster.ranks_per_node=3", f"run.dir={run}", code=0)
    return run


def test_runs_on_other_ranks_are_equal(plain, tmp_path):
    run = tmp_path / "run"
    call(FLIPPED, *COMMON, "cluster.ranks_per_node=2", f"run.dir={run}", code=0)
    found = bisect(plain, run, code=0)
    assert (found["updates"], found["update"], found["by_digest"]) == (8, None, True)
    assert any(text.startswith("cluster.ranks_per_node") for text in found["unlike"])
    text = verb("bisect", plain, run, code=0).stdout
    assert "8 updates of both: gradient digests, losses have the same bits" in text


@pytest.mark.parametrize("seed", range(2))
def test_a_flipped_bit_is_found_in_update_micro_step_and_parameter(plain, tmp_path, seed):
    chosen = random.Random(seed)
    update, bit, parameter = chosen.randrange(8), chosen.randrange(23), chosen.choice(NAMES)
    order = DataOrder(dataset_samples=240, global_batch=24).indices(update).tolist()
    position = chosen.randrange(24)
    flip = f"+job.flip=[{update},{order[position]},{parameter},{bit}]"
    run = tmp_path / "run"
    call(FLIPPED, flip, *COMMON, "cluster.ranks_per_node=2", f"run.dir={run}", code=0)
    found = bisect(plain, run)
    fields = Fields("bisect")
    fields.check(found)
    assert fields.unseen == set()
    assert found["update"] == update
    assert next(iter(found["fields"])) == "gradient_digest"
    leaf = position // 4
    assert found["leaf"]["leaf"] == leaf
    assert found["leaf"]["samples"] == order[4 * leaf : 4 * leaf + 4]
    assert found["leaf"]["parameters"] == [parameter]
    assert found["repeats"] == [True, True]
    assert any(text.startswith("job.flip: ") for text in found["unlike"])
    assert not list(tmp_path.glob(".run.replay-*"))


def test_a_machine_that_computed_wrongly_does_not_repeat_its_record(plain, tmp_path):
    run = tmp_path / "run"
    sample = int(DataOrder(dataset_samples=240, global_batch=24).indices(4)[-1])
    flip = (f"+job.flip=[4,{sample},0.weight,20]", "+job.rank=2")  # rank 0 alone replays
    call(FLIPPED, *flip, *COMMON, "cluster.ranks_per_node=3", f"run.dir={run}", code=0)
    found = bisect(plain, run)
    assert (found["update"], found["leaf"], found["repeats"]) == (4, None, [True, False])
    text = verb("bisect", plain, run, code=1).stdout
    assert f"the replay of {run} does not repeat its record" in text


def lines(path, count, *, digests=True, changes=()):
    """Write a record of so many updates as runs do; `changes` replaces fields of some."""
    changed = dict(changes)
    with path.open("w") as file:
        for update in range(count):
            window = Window(
                update=update, samples=24, micro_batches=(), steps=6, learning_rate=0.001
            )
            digest = f"{update:016x}" if digests else None
            report = BoundaryReport(
                update=update,
                loss=1 / (update + 1),
                weight=24.0,
                gradient_norm=1 / (update + 1),
                gradient_digest=digest,
                metrics={"error": 0.5},
            )
            line = update_line(CompletedUpdate(window, report, 0.2), 0) | changed.get(update, {})
            file.write(json.dumps(line | {"attempt": 0}) + "\n")


def test_records_are_compared_as_texts_with_redone_and_torn_lines(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    lines(a, 50)
    lines(b, 60)
    with b.open("a") as file:  # a second attempt redoes the last, and is killed
        redone = [
            record(
                n,
                1,
                gradient_digest=f"{n:016x}",
                gradient_norm=1 / (n + 1),
                weight=24.0,
                samples=24,
            )
            for n in range(40, 60)
        ]
        file.write("".join(json.dumps(line) + "\n" for line in redone))
        file.write('{"update": 60, "ti')
    found = compare_records(a, b)
    assert (found.updates, found.update, found.by_digest) == (50, None, True)
    lines(b, 60, changes=[(33, {"gradient_digest": "f" * 16}), (34, {"loss": 7.0})])
    found = compare_records(a, b)
    assert (found.update, found.fields) == (
        33,
        {"gradient_digest": (f'"{33:016x}"', '"ffffffffffffffff"')},
    )
    lines(a, 60, digests=False)
    found = compare_records(a, b)
    assert (found.update, [*found.fields], found.by_digest) == (34, ["loss"], False)


def test_runs_without_a_common_update_are_refused(made):
    a, b = made("a", records=[record(0)]), made("b", records=[record(1)])
    for run in (a, b):
        write_json(run.environment, {"framework": {"torch": "2"}})
    refused = verb("bisect", a.path, b.path, code=2).stderr
    assert "have recorded no update that both have made" in " ".join(refused.split())


@pytest.mark.parametrize("recorded", [(), ("a",), ("a", "b")])
def test_environments_that_are_not_recorded_are_not_called_the_same(tmp_path, recorded):
    runs = [make_run(tmp_path / name) for name in "ab"]
    for run in runs:
        if run.path.name in recorded:
            write_json(run.environment, {"processor": "x86_64", "framework": {"threads": "1"}})
    unlike = differences_of(*runs)
    screen = Screen()
    found = Bisection(updates=9, by_digest=True, update=7, unlike=unlike)
    print_bisection(found, runs[0].path, runs[1].path, screen)
    same = "settings, code, versions, processor and threads are the same"
    if len(recorded) == 2:
        assert unlike == []
        assert same in screen.text
    else:
        assert unlike == [NOT_RECORDED]
        assert same not in screen.text


def test_replay_does_not_rule_out_versions_that_are_not_recorded():
    assert "nothing that is known to change bits differs" in _unrepeated(3, [])
    assert "the notes" in _unrepeated(3, ["computed with another torch", NOT_RECORDED])
    assert _unrepeated(3, [NOT_RECORDED]).startswith("versions, processor and threads: not record")
