"""Checks of a job class: by its source before submission, and by the worker that builds it."""

import sys
import textwrap

import pytest

from orchestrator.config.job_source import check_constructor, check_target
from orchestrator.errors import JobError
from orchestrator.source.modules import find_module
from orchestrator.trainer.job_class import build_job

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
    ("dotted", "words"),
    [
        ("Digits", "must be module.Class"),
        ("nowhere.jobs.Good", "there is no module 'nowhere.jobs'"),
        ("theirs.jobz.Good", "there is no module 'theirs.jobz'"),
        ("theirs.jobs.Gud", "did you mean 'Good'"),
        ("theirs.jobs.function", "is a function"),
        ("theirs.jobs", "theirs.jobs is a module; name a class in it, as in theirs.jobs.Good"),
        ("bare.jobs", "bare.jobs is a module; name a class in it$"),
        ("theirs", "_target_=theirs is a module; name a class in it$"),
        ("json.JSONEncoder", "is a part of Python, not a job"),
    ],
)
def test_what_is_no_job_is_refused_in_words(package, dotted, words):
    with pytest.raises(JobError, match=words):
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


def test_a_file_that_is_no_python_is_said(package, tmp_path):
    (tmp_path / "theirs" / "broken.py").write_text("class Broken(:\n")
    with pytest.raises(JobError, match="line 1"):
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
    ("name", "given", "words"),
    [
        ("Good", (), "needs the argument 'width'; add job.width="),
        ("Good", ("width", "dept"), r"takes no argument 'dept' \(from job.dept\); .* 'depth'"),
        ("Child", ("width", "rate", "x"), "takes no argument 'x'"),
        ("Poor", ("width",), "takes no argument 'width'"),
    ],
)
def test_arguments_that_a_constructor_does_not_take_are_refused_before_the_queue(
    package, name, given, words
):
    with pytest.raises(JobError, match=words):
        check_constructor(f"{package}.jobs.{name}", given)


@pytest.mark.parametrize(
    ("name", "given"),
    [("Good", ("width", "rate")), ("Data", ("width",)), ("Unknowable", ("x",)), ("Poor", ())],
)
def test_arguments_that_fit_or_of_which_the_source_does_not_tell_are_left(package, name, given):
    check_constructor(f"{package}.jobs.{name}", given)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"_target_": "theirs.parts.Poor"}, "is not a job: it has no dataset and no loss"),
        ({"_target_": "theirs.parts.Good"}, "needs the argument 'width'"),
        ({"_target_": "theirs.parts.Good", "width": 1, "dept": 2}, "did you mean 'depth'"),
        ({"_target_": "theirs.parts.Data", "width": 1, "height": 2}, "takes no argument 'height'"),
        ({"_target_": "theirs.parts.Data"}, "needs the argument 'width'"),
        ({"_target_": "theirs.parts.made"}, "must be a class, but is a object"),
    ],
)
def test_a_worker_refuses_a_class_that_is_no_job_and_arguments_that_it_does_not_take(
    package, tmp_path, monkeypatch, job, words
):
    source = (tmp_path / package / "jobs.py").read_text()
    for line in ("class Unknowable(some.factory()):\n    pass", "explode = 1 / 1"):
        source = source.replace(line, "")
    (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / package / "parts.py").write_text(source)
    try:
        with pytest.raises(JobError, match=words.replace("(", r"\(")):
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
