import pytest

from orchestrator.testing import ClusterSuite


class TestListedNames(ClusterSuite):
    @pytest.fixture
    def cluster(self):
        return ["cluster.kind=listed", "cluster.options.names=[ann,bob]"]
