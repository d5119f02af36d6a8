import pytest

from orchestrator.run_folder.rundir import RunDir


@pytest.fixture
def run(tmp_path):
    """The folder of a run with one attempt."""
    run = RunDir(tmp_path / "run")
    run.create()
    run.attempt(0).mkdir()
    return run
