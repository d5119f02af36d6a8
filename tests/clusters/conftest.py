import pytest

from orchestrator.rundir.folder import RunDir


@pytest.fixture
def run(tmp_path):
    """The folder of a run with one attempt."""
    run = RunDir(tmp_path / "run")
    run.create()
    run.attempt(0).mkdir()
    return run
