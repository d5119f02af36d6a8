"""Development cluster for tests: brought up for their duration, and left as it was found.

In a conftest.py:

    @pytest.fixture(scope="session")
    def slurm_cluster() -> Iterator[DevCluster]:
        with dev_cluster("tests") as cluster:
            yield cluster
"""

import contextlib
from collections.abc import Generator
from pathlib import Path

from slurm.dev_cluster import DevCluster


@contextlib.contextmanager
def dev_cluster(
    name: str,
    *,
    nodes: int = 4,
    accounting: bool = True,
    base: Path | None = None,
    remove: bool = False,
) -> Generator[DevCluster, None, None]:
    """Bring the cluster up inside, and down afterwards unless it was up before.

    With `remove`, its folder is removed too. Use one name for each worker of a parallel test run:
    the worker that brings it up takes it down.
    """
    cluster = DevCluster(name, nodes=nodes, accounting=accounting, base=base, say=print)
    was_up = cluster.status().is_up
    try:
        cluster.up()
        yield cluster
    finally:
        if remove:
            cluster.remove()
        elif not was_up:
            cluster.down()
