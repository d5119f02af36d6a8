"""What others add by an entry point: found by its name, and refused in one sentence if it is no
good.
"""

import sys

import pytest

from orchestrator.clusters.api import cluster_of
from orchestrator.config.composer import compose
from orchestrator.errors import ConfigError
from orchestrator.plugins import CLUSTERS, shadowed
from tests.helpers import TINY

CLUSTER = """
from dataclasses import dataclass
from omegaconf import MISSING
from orchestrator.clusters.api import Cluster

@dataclass
class Options:
    hosts: list[str] = MISSING
    port: int = 22

class Good(Cluster):
    Options = Options
    def submit(self, request):
        raise NotImplementedError

class NoSubmit(Cluster):
    pass

class Raises(Good):
    def __init__(self, config, tell):
        super().__init__(config, tell)
        raise KeyError("HOSTS")

class NoCluster:
    pass
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install a package as pip would leave it: its modules, and beside them its entry points."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name, value="theirs:Good", package="theirs-package"):
        module = value.partition(":")[0]
        (tmp_path / f"{module}.py").write_text(CLUSTER)
        sys.modules.pop(module, None)
        folder = tmp_path / f"{package.replace('-', '_')}-1.2.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        entry = f"[{CLUSTERS.group}]\n{name} = {value}\n"
        (folder / "entry_points.txt").write_text(entry)
        return tmp_path / f"{module}.py"

    yield install
    for module in ("theirs", "others"):
        sys.modules.pop(module, None)


def test_a_cluster_of_an_installed_package_is_found_by_its_name_with_its_own_options(installed):
    installed("theirs")
    config = compose([TINY, "cluster.kind=theirs", "cluster.options.hosts=[a,b]"])
    cluster = cluster_of(config)
    assert type(cluster).__name__ == "Good"
    assert (cluster.options.hosts, cluster.options.port) == (["a", "b"], 22)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("theirs:Missing", "theirs:Missing of theirs-package 1.2 cannot be imported: Attribute"),
        ("theirs:NoSubmit", "theirs:NoSubmit of theirs-package 1.2 has no submit"),
        ("theirs:NoCluster", "is no subclass of orchestrator.clusters.api.Cluster"),
        ("theirs:Raises", "theirs:Raises of theirs-package 1.2 failed at its start: KeyError"),
    ],
)
def test_a_class_that_cannot_be_used_is_named_with_its_package_and_what_it_lacks(
    installed, value, words
):
    installed("theirs", value)
    config = compose([TINY, "cluster.kind=theirs", "cluster.options.hosts=[a]"])
    with pytest.raises(ConfigError) as caught:
        cluster_of(config)
    assert str(caught.value).startswith("cluster.kind=theirs: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("raised", ["raise ValueError('broken')", "import no_such", "exit(3)", "("])
def test_a_module_that_cannot_be_imported_is_one_sentence(installed, raised):
    installed("theirs").write_text(raised)
    with pytest.raises(ConfigError, match=r"theirs:Good of theirs-package 1\.2 cannot be imported"):
        cluster_of(compose([TINY, "cluster.kind=theirs"]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("cluster.options.hots=[a]", "no key 'cluster.options.hots'; did you mean 'hosts'?"),
        ("cluster.options.port=22", "cluster.options.hosts has to be set"),
        ("cluster.options.hosts=[a] cluster.options.port=here", "cluster.options.port: "),
    ],
)
def test_options_are_what_the_class_says_it_has(installed, options, words):
    installed("theirs")
    with pytest.raises(ConfigError) as caught:
        cluster_of(compose([TINY, "cluster.kind=theirs", *options.split()]))
    assert words in str(caught.value)


def test_a_name_that_two_packages_have_is_refused_with_both(installed):
    installed("theirs")
    installed("theirs", "others:Good", package="another")
    with pytest.raises(ConfigError) as caught:
        compose([TINY, "cluster.kind=theirs"])
    assert "is registered by another 1.2 and theirs-package 1.2; uninstall" in str(caught.value)


def test_a_name_that_nobody_has_is_answered_with_those_that_there_are(installed):
    installed("theirs")
    answers = {
        "thiers": "local, slurm, theirs, but is 'thiers'; did you mean 'theirs'?",
        "zzzz": "another one comes with a package that registers it in orchestrator.clusters",
    }
    for asked, words in answers.items():
        with pytest.raises(ConfigError) as caught:
            compose([TINY, f"cluster.kind={asked}"])
        assert words in str(caught.value)


def test_a_package_that_takes_a_name_of_ours_changes_nothing_and_is_told_so(installed):
    installed("slurm")
    assert type(cluster_of(compose([TINY, "+cluster=slurm"]))).__name__ == "SlurmCluster"
    [sentence] = shadowed()
    assert "theirs-package 1.2 registers cluster.kind=slurm, which is ours" in sentence


def test_what_only_slurm_reads_is_refused_on_a_cluster_of_somebody_elses(installed):
    installed("theirs")
    with pytest.raises(ConfigError, match=r"cluster\.partition means nothing on a theirs cluster"):
        compose([TINY, "cluster.kind=theirs", "cluster.partition=gpu"])
