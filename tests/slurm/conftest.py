"""One real SLURM for the tests of this folder."""

import getpass
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm.dev_cluster import DevCluster
from slurm.testing import dev_cluster
from tests.helpers import until
from tests.slurm.runs import LONG, reference


@pytest.fixture(scope="session")
def slurm() -> Iterator[DevCluster]:
    # pytest's own temporary folders are too long for the paths of Unix sockets.
    base = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        with dev_cluster("runs", base=base, remove=True) as cluster:
            yield cluster
    finally:
        shutil.rmtree(base)


@pytest.fixture(scope="module", autouse=True)
def no_job_is_left(slurm: DevCluster) -> Iterator[None]:
    """Cancel what a failed test or fixture has left: it would take the next module's nodes."""
    yield
    slurm.command("scancel", "--user", getpass.getuser())
    until(lambda: not slurm.command("squeue", "-ha"), 60, "the end of the module's jobs")


@pytest.fixture
def mended(slurm: DevCluster) -> Iterator[DevCluster]:
    """The cluster for a test that breaks it; it is repaired afterwards."""
    yield slurm
    slurm.up()


@pytest.fixture(scope="session")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the weights of an undisturbed local run of `LONG`."""
    return reference(tmp_path_factory.mktemp("reference") / "run", *LONG)
