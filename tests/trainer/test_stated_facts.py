"""Facts and code that ranks compare before they train."""

import importlib
import sys

import pytest

from orchestrator.config.schema import FactsConfig
from orchestrator.errors import ConfigError
from orchestrator.trainer.same_inputs import compare_facts
from orchestrator.trainer.survival import modules_of
from tests.plan.stated import make_plan
from tests.refusals import refused


def _compare(facts, ranks=2, **more):
    def plan_with(parameters, samples):
        given = {"parameters": parameters, "dataset_samples": samples, **more}
        return make_plan(nodes=1, ranks_per_node=ranks, global_batch=100, **given)

    compare_facts(FactsConfig(**facts), plan_with(2_000_000, 1000), plan_with)


@pytest.mark.parametrize(
    ("facts", "more", "names"),
    [
        ({"dataset_samples": 500}, {}, "facts.dataset_samples=500 1000"),
        ({"dataset_samples": 500}, {"epochs": 2}, "updates 10 20"),
        ({"dataset_samples": 90}, {"updates": 4}, "samples_per_rank (45, 45) (50, 50)"),
        ({"parameters": 900}, {}, "collectives_per_update 1 2"),
        (
            {"parameters": 900, "dataset_samples": 7},
            {},
            "facts.parameters=2000000 facts.dataset_samples=1000",
        ),
    ],
)
def test_wrong_fact_that_changes_the_plan_is_refused(facts, more, names):
    with refused(ConfigError, names):
        _compare(facts, **more)


@pytest.mark.parametrize(
    ("facts", "ranks"), [({"parameters": 1_999_999}, 2), ({"parameters": 1}, 1)]
)
def test_a_wrong_fact_that_changes_nothing_is_warned_of(facts, ranks):
    with pytest.warns(UserWarning, match="but the model has 2000000; the plan is the same"):
        _compare(facts, ranks)


def test_true_facts_and_none_at_all_are_not_mentioned(recwarn):
    _compare({})
    _compare({"parameters": 2_000_000, "dataset_samples": 1000})
    assert not recwarn.list


def test_a_file_of_the_jobs_own_that_changed_on_disk_is_named(tmp_path, monkeypatch):
    (tmp_path / "its_net.py").write_text("WIDTH = 4\n")
    (tmp_path / "its_job.py").write_text("import its_net, json\nclass Own: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    job = importlib.import_module("its_job").Own()
    then = modules_of(job)
    assert {"its_job", "its_net"} <= then.keys()
    assert not {"json", "pytest", "orchestrator"} & then.keys()
    assert modules_of(job) == then
    (tmp_path / "its_net.py").write_text("WIDTH = 5\n")
    assert {name for name, digest in modules_of(job).items() if digest != then[name]} == {"its_net"}
    for name in ("its_job", "its_net"):
        del sys.modules[name]
