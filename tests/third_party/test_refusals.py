"""A third party's class that cannot be used is refused in one sentence that names its package."""

import re
import sys

import pytest

from orchestrator.clusters.api import cluster_of
from orchestrator.config.composer import compose
from orchestrator.config.frameworks import facts_of
from orchestrator.engine.api import Framework
from orchestrator.errors import ConfigError
from orchestrator.local_ranks.processes import run_ranks
from orchestrator.plugins import (
    CLUSTERS,
    FRAMEWORK_FACTS,
    FRAMEWORKS,
    TRACKERS,
    TRANSPORTS,
)
from orchestrator.rundir.folder import RunDir
from orchestrator.trainer.recorder import Scalars
from tests.helpers import ROOT, TINY, call
from tests.refusals import refused

BASES = {
    CLUSTERS.group: "orchestrator.clusters.api.Cluster",
    TRANSPORTS.group: "orchestrator.engine.torch.transports.Transport",
    FRAMEWORKS.group: "orchestrator.engine.api.Framework",
    FRAMEWORK_FACTS.group: "orchestrator.config.frameworks.FrameworkFacts",
    TRACKERS.group: "orchestrator.trainer.recorder.Tracker",
}


@pytest.fixture
def registered(tmp_path, monkeypatch):
    """Install `theirs`, whose class for a kind is made of a source."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def register(kind, source, name="theirs", package="theirs"):
        info = folder / f"{package}-1.2.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        module, base = BASES[kind.group].rsplit(".", 1)
        (folder / "theirs.py").write_text(f"from {module} import {base}\n{source}\n")
        (info / "entry_points.txt").write_text(f"[{kind.group}]\n{name} = theirs:Theirs\n")
        sys.modules.pop("theirs", None)
        return folder

    yield register
    sys.modules.pop("theirs", None)


SUBMITS = "class Theirs(Cluster):\n    def submit(self, request): pass\n"
OPTIONS = f"""
from dataclasses import dataclass
from omegaconf import MISSING

@dataclass
class TheirOptions:
    hosts: list[str] = MISSING
    port: int = 22

{SUBMITS}
    Options = TheirOptions
"""


def test_a_cluster_is_found_by_its_name_with_its_own_options(registered):
    registered(CLUSTERS, OPTIONS)
    cluster = cluster_of(compose([TINY, "cluster.kind=theirs", "cluster.options.hosts=[a,b]"]))
    assert type(cluster).__name__ == "Theirs"
    assert (cluster.options.hosts, cluster.options.port) == (["a", "b"], 22)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("Other = 1", "AttributeError"),
        ("raise ValueError('broken')", "ValueError broken"),
        ("exit(3)", "SystemExit"),
        ("class Theirs(Cluster): pass", "submit"),
        ("class Theirs: pass", "orchestrator.clusters.api.Cluster"),
        (f"{SUBMITS}    def __init__(self, *_): raise KeyError('A')", "KeyError"),
    ],
)
def test_unusable_class_is_refused(registered, source, names):
    registered(CLUSTERS, source)
    with refused(ConfigError, f"cluster.kind=theirs theirs:Theirs 1.2 {names}") as caught:
        cluster_of(compose([TINY, "cluster.kind=theirs"]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ("cluster.options.hots=[a]", "cluster.options.hots hosts"),
        ("cluster.options.port=22", "cluster.options.hosts"),
        ("cluster.options.hosts=[a] cluster.options.port=here", "cluster.options.port"),
        ("run.survive=true", "run.survive=true theirs"),
        ("cluster.partition=gpu", "cluster.partition theirs"),
    ],
)
def test_keys_are_what_the_class_says_it_has(registered, options, names):
    registered(CLUSTERS, OPTIONS)
    with refused(ConfigError, names):
        cluster_of(compose([TINY, "cluster.kind=theirs", *options.split()]))


def test_a_cluster_that_supports_survival_may_have_it(registered):
    registered(CLUSTERS, SUBMITS + "    supports_survival = True\n")
    for words, survives in (([], True), (["run.survive=true"], True), (["cluster.nodes=1"], False)):
        cluster = cluster_of(compose([TINY, "cluster.kind=theirs", *words]))
        assert cluster.survives is survives


def test_a_name_belongs_to_one_package_and_never_one_of_ours(registered):
    registered(CLUSTERS, SUBMITS)
    registered(CLUSTERS, SUBMITS, package="another")
    with refused(ConfigError, "cluster.kind=theirs another theirs 1.2"):
        compose([TINY, "cluster.kind=theirs"])
    registered(CLUSTERS, SUBMITS, name="slurm")
    assert type(cluster_of(compose([TINY, "cluster=slurm"]))).__name__ == "SlurmCluster"
    with refused(ConfigError, "cluster.kind zzzz"):
        compose([TINY, "cluster.kind=zzzz"])


FORM = "    @classmethod\n    def form(cls, spec, store): "
LACKING = "    @classmethod\n    def lacking(cls, everyone): raise KeyError('x')"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (f"{FORM}raise RuntimeError('no cable')", "could not connect to the others over theirs"),
        (f"{FORM}raise KeyError('PORT')", "of theirs 1.2 failed to form a group: KeyError: 'PORT'"),
        (f"{FORM}pass", "of theirs 1.2 failed to form a group: TypeError: form() gave None"),
        (f"{FORM}pass\n{LACKING}", "of theirs 1.2 failed to say whether these ranks can use it"),
    ],
)
def test_a_transport_that_cannot_be_used_is_told_by_its_ranks(registered, tmp_path, body, words):
    registered(TRANSPORTS, f"class Theirs(Transport):\n{body}")
    with pytest.raises(AssertionError, match=re.escape(words)):
        run_ranks(2, tmp_path, print, transport="theirs")


INIT = "    def __init__(self, *given): raise KeyError('TOKEN')\n"
FAILS = "failed at its start: KeyError: 'TOKEN' ("
METHODS = "".join(
    f"    def {name}(self, *given): pass\n" for name in ("form_group", "build_engine", "versions")
)


def test_framework_or_tracker_that_fails_at_start(registered, tmp_path):
    registered(FRAMEWORKS, f"class Theirs(Framework):\n{METHODS}{INIT}")
    with pytest.raises(ConfigError) as caught:
        FRAMEWORKS.make("theirs", Framework)
    assert str(caught.value).startswith(f"framework=theirs: theirs:Theirs of theirs 1.2 {FAILS}")
    registered(TRACKERS, f"class Theirs(Tracker):\n    def write(self, *given): pass\n{INIT}")
    with pytest.raises(ConfigError) as caught:
        Scalars(RunDir(tmp_path), compose([TINY, "tracker.kind=theirs"]))
    assert str(caught.value).startswith(f"tracker.kind=theirs: theirs:Theirs of theirs 1.2 {FAILS}")


def test_unusable_facts_are_reported(registered):
    registered(FRAMEWORK_FACTS, "raise ValueError('broken')")
    with pytest.raises(ConfigError) as caught:
        facts_of("theirs")
    sentence = "framework=theirs: theirs:Theirs of theirs 1.2 cannot be imported: ValueError"
    assert str(caught.value).startswith(sentence)
    assert facts_of("another").cpu_transport == "gloo"


def test_untrained_run_does_not_count_as_finished(registered, tmp_path):
    folder = registered(
        CLUSTERS,
        "from orchestrator.clusters.api import Handle, State\n"
        "class Mine(Handle):\n"
        "    def poll(self, timeout_s): return State.FINISHED\n"
        "    stop = kill = poll\n"
        "class Theirs(Cluster):\n"
        "    def submit(self, request): return Mine()",
    )
    asked = (TINY, "cluster.kind=theirs", f"run.dir={tmp_path / 'run'}")
    done = call(*asked, PYTHONPATH=f"{folder}:{ROOT}", code=1)
    assert "none wrote a result" in done.stdout + done.stderr
