import pytest

from tests.report.conftest import neutral_environment
from tests.run_folders import maker, result

__all__ = ["neutral_environment"]


@pytest.fixture(scope="session")
def sweep(tmp_path_factory):
    """Three points, of which one failed. To be read only."""
    home = tmp_path_factory.mktemp("page")
    made = maker(home)
    culprit = {"rank": 2, "node": "node1", "cause": "ValueError: <b>bold</b>", "log_tail": []}
    made("sweep/0", "accumulation.steps=1")
    made("sweep/1", "accumulation.steps=2")
    made("sweep/10", "accumulation.steps=4", ended=result(state="failed", culprit=culprit))
    return home / "sweep"
