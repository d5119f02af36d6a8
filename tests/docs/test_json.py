"""docs/reference/json.md has the fields that the commands print, each with its types."""

import json
import re
from dataclasses import dataclass, field

import pytest

from orchestrator.__main__ import app
from tests.docs.printed import ROOT
from tests.helpers import LIGHT, TINY, call, verb
from tests.sweep.search.helpers import line_of

PAGE = ROOT / "docs" / "reference" / "json.md"
ONE = ("cluster.nodes=1", "cluster.ranks_per_node=1", "tracker=none")
SHORT = (*ONE, "accumulation.global_batch=24", "accumulation.steps=1", "train.updates=6")
CHECKS = {
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "text": lambda value: isinstance(value, str),
    "null": lambda value: value is None,
    "true": lambda value: value is True,
    "false": lambda value: value is False,
    "object": lambda value: isinstance(value, dict),
    "list": lambda value: isinstance(value, list),
}
ITEMS = {"numbers": "number", "texts": "text", "objects": "object", "lists": "list"}


@dataclass
class Field:
    """A row of a table: may it be absent, the kinds of its values, and what was printed of it."""

    optional: bool
    kinds: list[str]
    seen: int = 0

    def accepts(self, value):
        for kind in self.kinds:
            name, _, items = kind.partition(" of ")
            if CHECKS[name](value) and (
                not items or all(CHECKS[ITEMS[items]](item) for item in value)
            ):
                return True
        return False


@dataclass
class Table:
    """The fields of one verb by their paths, in which a word in capitals is any name."""

    fields: dict[str, Field] = field(default_factory=dict)

    def children(self, path):
        depth = path.count(".") + 1 if path else 0
        return {
            name.rpartition(".")[2]: name
            for name in self.fields
            if name.startswith(f"{path}." if path else "") and name.count(".") == depth
        }

    def check(self, value, path=""):
        """Check an object against the fields below a path, and count those that it has."""
        children = self.children(path)
        wildcard = next((name for key, name in children.items() if key.isupper()), None)
        for key, inner in value.items():
            name = children.get(key, wildcard)
            assert name, f"{path}.{key} is printed, but not in {PAGE.name}"
            documented = self.fields[name]
            documented.seen += 1
            assert documented.accepts(inner), f"{name} is {inner!r}, no {documented.kinds}"
            objects = inner if isinstance(inner, list) else [inner]
            if self.children(name):
                for item in objects:
                    if isinstance(item, dict):
                        self.check(item, name)
        if "program" not in value:  # of which few fields are printed
            needed = {key for key, name in children.items() if not self.fields[name].optional}
            missing = {key for key in needed if not key.isupper()} - value.keys()
            assert not missing, f"{path}: {missing} not printed"

    def never_printed(self):
        return [name for name, documented in self.fields.items() if not documented.seen]


def tables():
    found = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        table = found[section.partition("\n")[0]] = Table()
        for line in section.splitlines():
            if line.startswith("| `"):
                names, kinds, meaning = (cell.strip() for cell in line.strip("|").split("|"))
                row = {"optional": meaning.startswith("*where*"), "kinds": kinds.split(" or ")}
                table.fields |= {name: Field(**row) for name in re.findall("`(.*?)`", names)}
    return found


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


def test_every_verb_with_the_option_has_a_section():
    having = {
        command.callback.__name__
        for command in app.registered_commands
        if "as_json" in command.callback.__wrapped__.__annotations__
    }
    assert having - {"wait"} == tables().keys()  # which prints what status does


def test_plan(runs, tmp_path):
    table = tables()["plan"]
    call(TINY, *SHORT, "run.dir=trunk", cwd=tmp_path, code=0)
    (tmp_path / "lengths.txt").write_text("5\n9\n3\n7\n" * 8)
    (tmp_path / "train.py").write_text("")
    for words in (
        ("job=digits",),
        ("job=digits", "cluster=slurm"),
        ("job=digits", "train.samples=5000", "accumulation.batch_schedule=[[4,512]]"),
        ("job=gpt2",),
        ("job=gpt2", "facts.lengths=lengths.txt", "facts.dataset_samples=32",
         "accumulation.global_batch=16"),
        (TINY, *SHORT),
        (TINY, *SHORT, "facts.dataset_samples=240", "train.initial_state=trunk@6",
         "train.updates=12"),
        ("--", "train.py"),
    ):  # fmt: skip
        table.check(printed("plan", *words, cwd=tmp_path))
    for plan in printed("plan", "-m", "job=digits", "train.seed=1,2", cwd=tmp_path):
        table.check(plan)
    assert table.never_printed() == []


def test_status_and_wait(runs, tmp_path):
    table = tables()["status"]
    search = tmp_path / "search"
    call("-m", *line_of(search, "sweep.trials=6", "sweep.seed=1"), cwd=tmp_path)
    for rows in (
        printed("status", runs / "good", runs / "bad"),
        printed("wait", runs / "good", runs / "bad", codes=(1,)),
        printed("status", search),
    ):
        for row in rows:
            if row["folder"] is None:
                assert row.keys() == {"folder", "state", "trials"}
            else:
                table.check(row)
    assert table.never_printed() == []
    [row] = printed("status", runs / "good", "--columns", "train.updates")
    assert row["train.updates"] == 6


def test_compare(tmp_path):
    table = tables()["compare"]
    for name, steps in (("a", 1), ("b", 2)):
        words = (TINY, *SHORT, f"accumulation.steps={steps}", f"run.dir={name}")
        call(*words, cwd=tmp_path, code=0)
    table.check(printed("compare", tmp_path / "a", tmp_path / "b"))
    [file] = tmp_path.glob("a/checkpoints/*/weights.safetensors")
    table.check(printed("compare", file, file))
    assert table.never_printed() == []


def test_doctor(tmp_path):
    table = tables()["doctor"]
    for finding in printed("doctor", cwd=tmp_path, codes=(0, 1)):
        table.check(finding)
    assert table.never_printed() == []


def test_rehearse(tmp_path):
    table = tables()["rehearse"]
    words = (TINY, "accumulation.global_batch=48", "accumulation.micro_batch=4")
    table.check(printed("rehearse", *words, "--faults", 1, cwd=tmp_path))
    assert table.never_printed() == []


def test_audit(tmp_path):
    table = tables()["audit"]
    table.check(printed("audit", TINY, *ONE, "--updates", 3, cwd=tmp_path, codes=(0, 1, 4)))
    assert table.never_printed() == []
