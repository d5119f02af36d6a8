"""One real SLURM for all tests of this folder that submit runs."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm.dev_cluster import DevCluster
from slurm.testing import dev_cluster
from tests.slurm.runs import reference


@pytest.fixture(scope="session")
def slurm() -> Iterator[DevCluster]:
    # pytest's own temporary folders are too long for the paths of Unix sockets.
    base = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        with dev_cluster("runs", base=base, remove=True) as cluster:
            yield cluster
    finally:
        shutil.rmtree(base)


@pytest.fixture
def mended(slurm: DevCluster) -> Iterator[DevCluster]:
    """The cluster, to be broken: it is whole again afterwards."""
    yield slurm
    slurm.up()


@pytest.fixture(scope="session")
def digest_of_60(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights after 60 updates of the tiny job, undisturbed and local."""
    return reference(tmp_path_factory.mktemp("reference") / "run", "train.updates=60")
