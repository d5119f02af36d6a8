"""A job's class is judged from its source: found, a job, with the arguments that it gets."""

import sys
import textwrap

import pytest

from orchestrator.config.job_source import check_target
from orchestrator.errors import JobError

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

    class Instance(Poor):
        def __init__(self):
            self.framework = "mindspore"
        def dataset(self): ...
        def loss(self, model, batch): ...

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
    monkeypatch.syspath_prepend(str(tmp_path))
    return "theirs"


@pytest.mark.parametrize(
    "job",
    [
        {"_target_": "theirs.jobs.Good", "width": 1},
        {"_target_": "theirs.jobs.Good", "width": 1, "rate": 0.5},
        {"_target_": "theirs.jobs.Child", "width": 1, "depth": 3},
        {"_target_": "theirs.jobs.Data", "width": 1},
        {"_target_": "theirs.again.Renamed", "width": 1},
        {"_target_": "theirs.jobs.Unknowable", "anything": 1},
        {"_target_": "theirs.jobs.made"},
    ],
)
def test_what_is_a_job_or_may_be_one_passes_without_being_imported(package, job):
    check_target(job)
    assert "theirs" not in sys.modules


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"_target_": "Digits"}, "must be module.Class"),
        ({"_target_": "nowhere.jobs.Good"}, "there is no module 'nowhere.jobs'"),
        ({"_target_": "theirs.jobz.Good"}, "there is no module 'theirs.jobz'"),
        ({"_target_": "theirs.jobs.Gud"}, "did you mean 'Good'"),
        ({"_target_": "theirs.jobs.function"}, "is a function"),
        ({"_target_": "theirs.jobs.Poor"}, "is not a job: it has no dataset and no loss"),
        ({"_target_": "theirs.jobs.Dotted"}, "is not a job"),
        ({"_target_": "theirs.jobs.Good"}, "needs the argument 'width'"),
        ({"_target_": "theirs.jobs.Good", "width": 1, "dept": 2}, "did you mean 'depth'"),
        ({"_target_": "theirs.jobs.Data", "width": 1, "height": 2}, "takes no argument 'height'"),
        ({"_target_": "theirs.jobs.Data"}, "needs the argument 'width'"),
    ],
)
def test_what_is_no_job_is_refused_in_words(package, job, words):
    with pytest.raises(JobError, match=words.replace("(", r"\(")):
        check_target(job)


def test_the_source_tells_framework_and_metrics(package):
    facts = check_target({"_target_": "theirs.jobs.Child", "width": 1})
    assert (facts.framework, facts.metric_count) == ("mindspore", 2)


@pytest.mark.parametrize(
    ("job", "framework"),
    [
        ({"_target_": "theirs.jobs.Data", "width": 1}, "torch"),
        ({"_target_": "theirs.jobs.Instance"}, None),
        ({"_target_": "theirs.jobs.Unknowable"}, None),
        ({"_target_": "jobs.digits.Digits"}, "torch"),
    ],
)
def test_a_job_that_states_no_framework_is_torchs_when_its_source_is_known(package, job, framework):
    assert check_target(job).framework == framework


def test_a_file_that_is_no_python_is_said(package, tmp_path):
    (tmp_path / "theirs" / "broken.py").write_text("class Broken(:\n")
    with pytest.raises(JobError, match="line 1"):
        check_target({"_target_": "theirs.broken.Broken"})


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("model.eval()", "nothing"),
        ("return", "nothing"),
        ("...", "nothing"),
        ("return [0.9]", "a list"),
        ("return 'accuracy', 0.9", "a tuple"),
        ("return self.right / 10", "a number"),
        ("return float(model(self.x).mean())", "a number"),
        ("return model(self.x).mean().item()", "a number"),
        ("if model: return 0.5\n        return [1]", "a float"),
        ("def inner(): return {}\n        return [inner()]", "a list"),
        ("yield {'a': 1}", "a generator"),
        ("return {'accuracy': 0.9}", None),
        ("return dict(a=1)", None),
        ("return self.first(model) | {'a': 1}", None),
        ("return measured(model)", None),
        ("if model: return None\n        return {'a': 1}", None),
        ("raise NotImplementedError", None),
    ],
)
def test_an_evaluate_that_can_never_return_figures_is_refused_before_anything_starts(
    package, tmp_path, body, told
):
    source = (tmp_path / package / "jobs.py").read_text()
    (tmp_path / package / "jobs.py").write_text(
        f"{source}\nclass Rates(Good):\n    def evaluate(self, model):\n        {body}\n"
    )
    job = {"_target_": "theirs.jobs.Rates", "width": 1}
    if told is None:
        assert check_target(job).metric_count == 2
        return
    with pytest.raises(JobError, match=f"Rates.evaluate.. must return .*, but returns {told}$"):
        check_target(job)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("def optimizer(self, model):\n        sgd(model)", r"optimizer\(\) returns nothing"),
        (
            "def model(self):\n        self.net = make()",
            r"model\(\) returns nothing; is a `return`",
        ),
        ("def loss(self, model, batch):\n        sum(batch)", r"loss\(\) returns nothing"),
        ("metric_names = ('accuracy')", r"must be a tuple of names, as in \('accuracy',\)"),
        ("def evalute(self, model):\n        return {}", "did you mean 'evaluate'"),
        ("def optimiser(self, model):\n        return sgd(model)", "did you mean 'optimizer'"),
        ("def collate_fn(self, samples):\n        return samples", "did you mean 'collate'"),
        ("metrics_names = ('a',)", "did you mean 'metric_names'"),
    ],
)
def test_a_slip_that_python_takes_is_refused_before_anything_starts(package, tmp_path, body, words):
    source = (tmp_path / package / "jobs.py").read_text()
    slip = f"{source}\nclass Slip(Good):\n    {body}\n"
    (tmp_path / package / "slips.py").write_text(slip)
    with pytest.raises(JobError, match=words):
        check_target({"_target_": f"{package}.slips.Slip", "width": 1})


@pytest.mark.parametrize(
    "body",
    [
        "def optimizer(self, model):\n        del model",
        "def optimizer(self, model):\n        print('the usual one')\n        return None",
        "def model(self):\n        raise NotImplementedError(str(self))",
        "def models(self):\n        return 1\n    def model(self):\n        return self.models()",
        "def losses(self):\n        return 1",
    ],
)
def test_what_may_be_meant_passes(package, tmp_path, body):
    source = (tmp_path / package / "jobs.py").read_text()
    (tmp_path / package / "meant.py").write_text(f"{source}\nclass Meant(Good):\n    {body}\n")
    check_target({"_target_": f"{package}.meant.Meant", "width": 1})
