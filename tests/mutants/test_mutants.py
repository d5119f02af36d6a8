"""What `make mutants` makes of a change: is it one of words, and has somebody looked at it?"""

import re
from pathlib import Path

import pytest

from tests.mutants.__main__ import Mutant, drawn, kind_of, listed, rate


def mutant(
    was, now, *, file="orchestrator/plan/wire.py", name="orchestrator.plan.wire.x_a__mutmut_1"
):
    return Mutant(name=name, file=Path(file), was=was, now=now)


@pytest.mark.parametrize(
    ("was", "now", "words_only"),
    [
        ('return "two words"', 'return "XXtwo wordsXX"', True),
        ('return "two words"', 'return "TWO WORDS"', True),
        ('note["why"]', 'note["XXwhyXX"]', False),
        ('note["why"]', 'note["WHY"]', False),
        ("a < b", "a <= b", False),
        ('f(a, "two words")', 'f(None, "two words")', False),
        ('f("two words")', "f(None)", False),
    ],
)
def test_only_a_change_of_several_words_is_one_of_words(was, now, words_only):
    assert mutant(was, now).words_only == words_only
    assert not mutant(
        was, now, file="orchestrator/clusters/slurm/request/batch_script.py"
    ).words_only


@pytest.mark.parametrize(
    ("mangled", "function"),
    [("x_max_rank", "max_rank"), ("xǁFenceǁtake", "Fence.take"), ("x__note", "_note")],
)
def test_a_mutant_knows_its_function(mangled, function):
    name = f"orchestrator.box_of.{mangled}__mutmut_12"
    assert mutant("a", "b", name=name).function == f"orchestrator.box_of.{function}"


def test_what_was_looked_at_is_known_where_it_is_listed_and_nowhere_else():
    assert kind_of(mutant("zip(a, b, strict=True)", "zip(a, b, )")) == "equal"
    assert kind_of(mutant("rounded < 0", "rounded < 1")) is None
    for entry in listed():
        assert entry["kind"] in ("equal", "left")
        assert entry["why"]
        assert entry["function"] == "*" or _exists(entry["function"], entry["was"])


def _exists(function, was):
    module = re.match(r"[a-z_.]+(?=\.[A-Za-z_])", function)[0]
    while not (path := Path(module.replace(".", "/") + ".py")).exists():
        module = module.rpartition(".")[0]
    return was in path.read_text()


def test_a_rate_leaves_out_what_was_not_asked():
    assert rate({"killed": 9, "survived": 1, "equal": 5, "words only": 3}) == 0.9


def test_a_seed_draws_a_share_of_each_file_the_same_every_time():
    names, file = [f"m{n}" for n in range(95)], Path("orchestrator/a.py")
    first = drawn(names, file, 0.1, 0)
    assert len(first) == len(set(first)) == 10
    assert first == drawn(names, file, 0.1, 0) == sorted(first, key=names.index)
    assert first != drawn(names, file, 0.1, 1)
    assert drawn(names, file, 1.0, 5) == names
    assert len(drawn(names[:3], file, 0.01, 0)) == 1
    assert drawn([], file, 0.1, 0) == []
