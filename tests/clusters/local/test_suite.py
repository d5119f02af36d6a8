"""The suite that every cluster passes, on simulated nodes."""

import pytest

from orchestrator.testing import ClusterSuite


class TestLocal(ClusterSuite):
    @pytest.fixture
    def cluster(self):
        return ["cluster.kind=local"]
