"""One real SLURM for the tests of this folder."""

import contextlib
import getpass
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm.dev_cluster import DevCluster
from slurm.errors import DevClusterError
from slurm.testing import dev_cluster
from tests.helpers import until
from tests.slurm.runs import LONG, queued, reference

_RUN_FILES = (
    "*.log",
    "departure.json",
    "decision.json",
    "restart.json",
    "failure-*.json",
    "result.json",
)


@pytest.fixture(scope="session")
def base() -> Iterator[Path]:
    """A folder for clusters: pytest's own are too long for the paths of Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def slurm(base: Path) -> Iterator[DevCluster]:
    with dev_cluster("runs", base=base, remove=True) as cluster:
        yield cluster


@pytest.fixture(scope="module", autouse=True)
def no_job_is_left(slurm: DevCluster) -> Iterator[None]:
    """Cancel what a failed test or fixture has left: it would take the next module's nodes."""
    yield
    slurm.command("scancel", "--user", getpass.getuser())
    until(lambda: not slurm.command("squeue", "-ha"), what="the end of the module's jobs")


@pytest.fixture
def mended(slurm: DevCluster) -> Iterator[DevCluster]:
    """The cluster for a test that breaks it; it is repaired afterwards."""
    yield slurm
    slurm.up()


@pytest.fixture(scope="session")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the weights of an undisturbed local run of `LONG`."""
    return reference(tmp_path_factory.mktemp("reference") / "run", *LONG)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Add the last lines of runs and daemons to a failure's report."""
    report = yield
    if report.when == "call" and report.failed:
        found = getattr(item, "funcargs", {})
        cluster, folder = found.get("mended", found.get("slurm")), found.get("tmp_path")
        if isinstance(cluster, DevCluster):  # first what is short: the end of a report may be cut
            report.sections.append(("jobs and nodes", _queue(cluster)))
        if isinstance(folder, Path):
            files = [f for n in _RUN_FILES for f in folder.rglob(n) if "code" not in f.parts]
            report.sections += [(str(f.relative_to(folder)), _end(f, 12)) for f in sorted(files)]
        if isinstance(cluster, DevCluster):
            for daemon in ("slurmctld", *(f"slurmd-{node}" for node in cluster.node_names)):
                file = cluster.layout.log_file(daemon)
                report.sections.append((file.name, _end(file, 30 if daemon == "slurmctld" else 8)))
        if isinstance(cluster, DevCluster) and isinstance(folder, Path):
            _cancel_jobs_below(cluster, folder)  # the next test needs their nodes
    return report


def _queue(cluster: DevCluster) -> str:
    try:
        jobs = cluster.command("squeue", "-a", "-o", "%i %T %r %N %V %S")
        return jobs + cluster.command("sinfo", "-N", "-p", "main", "-o", "%N %T %E")
    except DevClusterError as error:  # a test may have stopped the controller
        return str(error)


def _cancel_jobs_below(cluster: DevCluster, folder: Path) -> None:
    with contextlib.suppress(DevClusterError):
        if jobs := queued(cluster, folder):
            cluster.command("scancel", *jobs)


def _end(file: Path, lines: int) -> str:
    return "\n".join(file.read_text("utf-8", "replace").splitlines()[-lines:])
