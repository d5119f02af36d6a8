"""docs/reference/json.yaml has the fields that the commands print, each with its types."""

import json

import pytest
import yaml
from jsonschema import Draft202012Validator

from orchestrator.__main__ import add_commands, app
from orchestrator.plugins import COMMANDS
from tests.docs.printed import ROOT
from tests.helpers import LIGHT, TINY, call, verb
from tests.search.helpers import line_of

pytestmark = pytest.mark.long

SCHEMAS = yaml.safe_load((ROOT / "docs" / "reference" / "json.yaml").read_text())
ONE = ("cluster.nodes=1", "cluster.ranks_per_node=1", "tracker=none")
SHORT = (*ONE, "accumulation.global_batch=24", "accumulation.steps=1", "train.updates=6")


class Fields:
    """The fields of a command's schema, by their paths; those that were printed are removed."""

    def __init__(self, name):
        self.schema = SCHEMAS[name]
        self.unseen = {*self._paths(self.schema)}

    def _children(self, schema, value=None):
        """Yield (name in the path, schema, values) of all that a schema has below it."""
        below = value if isinstance(value, list) else []
        if "items" in schema:
            yield "", schema["items"], below
        table = value if isinstance(value, dict) else {}
        for key, inner in schema.get("properties", {}).items():
            yield f"/{key}", inner, [table[key]] if key in table else []
        if isinstance(inner := schema.get("additionalProperties"), dict):
            yield "/*", inner, [*table.values()]

    def _paths(self, schema, path=""):
        for name, inner, _ in self._children(schema):
            yield path + name
            yield from self._paths(inner, path + name)

    def check(self, value):
        """Check what was printed against the schema."""
        Draft202012Validator(self.schema).validate(value)
        self._mark(self.schema, value, "")

    def _mark(self, schema, value, path):
        for name, inner, values in self._children(schema, value):
            for item in values:
                self.unseen.discard(path + name)
                self._mark(inner, item, path + name)


def printed(name, *arguments, codes=(0,), **more):
    done = verb(name, "--json", *arguments, **more)
    assert done.returncode in codes, done.stdout + done.stderr
    return json.loads(done.stdout)


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
    for name in SCHEMAS.keys() & {*COMMANDS.names()}:
        add_commands([name])
    having = {
        command.callback.__name__
        for command in app.registered_commands
        if "as_json" in command.callback.__wrapped__.__annotations__
    }
    assert having - {"wait"} == SCHEMAS.keys()  # which prints what status does
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


def test_status_and_wait(runs, tmp_path):
    fields = Fields("status")
    search = tmp_path / "search"
    call("-m", *line_of(search, "sweep.trials=6", "sweep.seed=1"), cwd=tmp_path)
    fields.check(printed("status", runs / "good", runs / "bad"))
    fields.check(printed("wait", runs / "good", runs / "bad", codes=(1,)))
    fields.check(printed("status", search))
    assert fields.unseen == set()
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


def test_rehearse(tmp_path):
    fields = Fields("rehearse")
    words = (TINY, "accumulation.global_batch=48", "accumulation.micro_batch=4")
    fields.check(printed("rehearse", *words, "--faults", 1, cwd=tmp_path))
    assert fields.unseen == set()


def test_audit(tmp_path):
    fields = Fields("audit")
    fields.check(printed("audit", TINY, *ONE, "--updates", 3, cwd=tmp_path, codes=(0, 1, 4)))
    assert fields.unseen == set()
