"""Checks of a job class: by its source before submission, and by the worker that builds it."""

import sys
import textwrap

import pytest

from orchestrator.config.job_source import check_constructor, check_target
from orchestrator.errors import JobError
from orchestrator.source.modules import find_module
from orchestrator.trainer.job_class import build_job
from tests.refusals import refused

SOURCE = """
    import dataclasses
    from dataclasses import dataclass
    from orchestrator import Job
    from orchestrator.job import Job as Base
    import orchestrator.job as jobs

    class Good(Job):
        framework = "mindspore"
        metric_names = ("a", "b")
        def __init__(self, width, depth=2, *, rate=0.1): ...
        def model(self): ...
        def dataset(self): ...
        def loss(self, model, batch): ...

    class Child(Good): ...

    class Dotted(jobs.Job):
        def model(self): ...

    @dataclass
    class Data(Base):
        width: int
        depth: int = 2
        def model(self): ...
        def dataset(self): ...
        def loss(self, model, batch): ...

    class Poor(Job):
        def model(self): ...

    class Unknowable(some.factory()):
        pass

    def function(): ...
    made = object()
    explode = 1 / 1
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('a package must not be run to look')\n")
    (folder / "jobs.py").write_text(textwrap.dedent(SOURCE))
    (folder / "again.py").write_text(
        "from .jobs import Good as Renamed\nfrom .jobs import nothing\n"
    )
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "jobs.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    return "theirs"


@pytest.mark.parametrize(
    "name",
    ["jobs.Good", "jobs.Child", "jobs.Data", "again.Renamed", "jobs.Unknowable", "jobs.made"],
)
def test_what_is_a_job_or_may_be_one_passes_without_being_imported(package, name):
    check_target(f"theirs.{name}")
    assert "theirs" not in sys.modules


@pytest.mark.parametrize(
    ("dotted", "names"),
    [
        ("Digits", "module.Class Digits"),
        ("nowhere.jobs.Good", "nowhere.jobs"),
        ("theirs.jobz.Good", "theirs.jobz"),
        ("theirs.jobs.Gud", "Gud Good"),
        ("theirs.jobs.function", "job._target_=theirs.jobs.function class"),
        ("theirs.jobs", "job._target_=theirs.jobs theirs.jobs.Good"),
        ("bare.jobs", "job._target_=bare.jobs class"),
        ("theirs", "job._target_=theirs class"),
        ("json.JSONEncoder", "job._target_=json.JSONEncoder Python"),
    ],
)
def test_what_is_no_job_is_refused(package, dotted, names):
    with refused(JobError, names):
        check_target(dotted)


def test_the_source_tells_framework_and_metrics(package):
    facts = check_target("theirs.jobs.Child")
    assert (facts.framework, facts.metric_count) == ("mindspore", 2)


@pytest.mark.parametrize(
    ("dotted", "framework"),
    [
        ("theirs.jobs.Data", "torch"),
        ("theirs.jobs.Dotted", "torch"),
        ("theirs.jobs.Unknowable", None),
        ("jobs.digits.Digits", "torch"),
    ],
)
def test_a_job_that_states_no_framework_is_torchs_when_its_source_is_known(
    package, dotted, framework
):
    assert check_target(dotted).framework == framework


def test_file_that_is_no_python_is_refused(package, tmp_path):
    (tmp_path / "theirs" / "broken.py").write_text("class Broken(:\n")
    with refused(JobError, "line 1"):
        check_target("theirs.broken.Broken")


@pytest.mark.parametrize(
    ("body", "builds"),
    [
        ("pass", False),
        ("def optimizer(self, model):\n        return sgd(model)", True),
        ("def optimizer(self, model):\n        return None", None),
        ("def optimizer(self, model):\n        if model:\n            return sgd(model)", None),
        ("def optimizer(self, model):\n        return super().optimizer(model)", None),
    ],
)
def test_a_job_builds_its_own_optimizer_unless_its_method_may_return_none(
    package, tmp_path, body, builds
):
    source = (tmp_path / package / "jobs.py").read_text()
    (tmp_path / package / "own.py").write_text(f"{source}\nclass Own(Good):\n    {body}\n")
    assert check_target(f"{package}.own.Own").own_optimizer is builds


@pytest.mark.parametrize(
    ("name", "given", "names"),
    [
        ("Good", (), "theirs.jobs.Good width job.width=…"),
        ("Good", ("width", "dept"), "dept job.dept depth"),
        ("Child", ("width", "rate", "x"), "x job.x"),
        ("Poor", ("width",), "width job.width"),
    ],
)
def test_unknown_arguments_of_a_constructor_are_refused(package, name, given, names):
    with refused(JobError, names):
        check_constructor(f"{package}.jobs.{name}", given)


@pytest.mark.parametrize(
    ("name", "given"),
    [("Good", ("width", "rate")), ("Data", ("width",)), ("Unknowable", ("x",)), ("Poor", ())],
)
def test_arguments_that_fit_or_of_which_the_source_does_not_tell_are_left(package, name, given):
    check_constructor(f"{package}.jobs.{name}", given)


@pytest.mark.parametrize(
    ("job", "names"),
    [
        ({"_target_": "theirs.parts.Poor"}, "job._target_=theirs.parts.Poor dataset loss"),
        ({"_target_": "theirs.parts.Good"}, "width job.width=…"),
        ({"_target_": "theirs.parts.Good", "width": 1, "dept": 2}, "dept job.dept depth"),
        ({"_target_": "theirs.parts.Data", "width": 1, "height": 2}, "height job.height"),
        ({"_target_": "theirs.parts.Data"}, "width job.width=…"),
        ({"_target_": "theirs.parts.made"}, "job._target_=theirs.parts.made class"),
    ],
)
def test_worker_refuses_wrong_class_and_arguments(package, tmp_path, monkeypatch, job, names):
    source = (tmp_path / package / "jobs.py").read_text()
    for line in ("class Unknowable(some.factory()):\n    pass", "explode = 1 / 1"):
        source = source.replace(line, "")
    (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / package / "parts.py").write_text(source)
    try:
        with refused(JobError, names):
            build_job(job)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)


def test_folders_without_init_files_are_packages_at_every_depth(package, tmp_path):
    for folder in ("utils/data", "theirs/deep/er"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "load.py").write_text(textwrap.dedent(SOURCE))
    for module in ("utils.data.load", "theirs.deep.er.load"):
        check_target(f"{module}.Good")
        assert find_module(module).origin == str(tmp_path / f"{module.replace('.', '/')}.py")
    assert find_module("utils.data.lost") is None
    assert not {"utils.data", "theirs.deep"} & sys.modules.keys()
