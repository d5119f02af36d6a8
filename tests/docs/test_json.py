"""docs/reference/json.yaml has the fields that the commands print, each with its types."""

import pytest
from jsonschema import Draft202012Validator

from orchestrator.__main__ import add_commands, app
from orchestrator.plugins import COMMANDS
from tests.docs.json_fields import SCHEMAS, Fields, printed
from tests.helpers import LIGHT, TINY, call

pytestmark = pytest.mark.long

ONE = ("cluster.nodes=1", "cluster.ranks_per_node=1", "tracker=none")
SHORT = (*ONE, "accumulation.global_batch=24", "accumulation.steps=1", "train.updates=6")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a folder with a finished run, one that failed, and a sweep."""
    home = tmp_path_factory.mktemp("json")
    evaluate = "train.evaluate_every=3"
    call(LIGHT, *SHORT, evaluate, "run.note=first", "run.dir=good", cwd=home, code=0)
    failing = ("job.fault=raise", "job.fault_rank=0", "job.fault_after=3")
    call(LIGHT, *SHORT, *failing, "run.dir=bad", cwd=home, code=1)
    return home


def test_every_verb_with_the_option_has_a_schema():
    missing = COMMANDS.ours.keys() - {*COMMANDS.names()}
    for name in COMMANDS.ours.keys() - missing:
        add_commands([name])
    having = {
        command.callback.__name__
        for command in app.registered_commands
        if "as_json" in command.callback.__wrapped__.__annotations__
    }
    assert having - {"wait"} == SCHEMAS.keys() - missing, "wait prints what status does"
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)


def test_plan(runs, tmp_path):
    fields = Fields("plan")
    call(TINY, *SHORT, "run.dir=trunk", cwd=tmp_path, code=0)
    (tmp_path / "lengths.txt").write_text("5\n9\n3\n7\n" * 8)
    (tmp_path / "train.py").write_text("")
    for words in (
        ("job=digits",),
        ("job=digits", "cluster=slurm"),
        ("job=digits", "train.samples=5000", "accumulation.batch_schedule=[[4,512]]"),
        ("job=gpt2",),
        (
            "job=gpt2",
            "facts.lengths=lengths.txt",
            "facts.dataset_samples=32",
            "accumulation.global_batch=16",
        ),
        (TINY, *SHORT, "cluster.ranks_per_node=2"),
        (
            TINY,
            *SHORT,
            "facts.dataset_samples=240",
            "train.initial_state=trunk@6",
            "train.updates=12",
        ),
        ("--", "train.py"),
    ):
        fields.check(printed("plan", *words, cwd=tmp_path))
    for plan in printed("plan", "-m", "job=digits", "train.seed=1,2", cwd=tmp_path):
        fields.check(plan)
    assert fields.unseen == set()


def test_status_and_wait(runs):
    fields = Fields("status")
    fields.check(printed("status", runs / "good", runs / "bad"))
    fields.check(printed("wait", runs / "good", runs / "bad", codes=(1,)))
    of_trials = {path for path in fields.unseen if "/trials" in path}
    assert fields.unseen == of_trials, "tests/search prints these"
    [row] = printed("status", runs / "good", "--columns", "train.updates")
    assert row["train.updates"] == 6


def test_compare(tmp_path):
    fields = Fields("compare")
    for name, steps in (("a", 1), ("b", 2)):
        words = (TINY, *SHORT, f"accumulation.steps={steps}", f"run.dir={name}")
        call(*words, cwd=tmp_path, code=0)
    fields.check(printed("compare", tmp_path / "a", tmp_path / "b"))
    [file] = tmp_path.glob("a/checkpoints/*/weights.safetensors")
    fields.check(printed("compare", file, file))
    assert fields.unseen == set()


def test_doctor(tmp_path):
    fields = Fields("doctor")
    fields.check(printed("doctor", cwd=tmp_path, codes=(0, 1)))
    assert fields.unseen == set()
