import pytest

from orchestrator.testing import ClusterSuite

pytestmark = [pytest.mark.whole_runs, pytest.mark.long]


class TestListedNames(ClusterSuite):
    @pytest.fixture
    def cluster(self):
        return ["cluster.kind=listed", "cluster.options.names=[ann,bob]"]
