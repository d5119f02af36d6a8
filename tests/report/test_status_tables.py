"""A search as its folder tells it: whole, or refused; never a traceback."""

from orchestrator.report.status_tables import print_search, search_of, with_trials
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir

TRIAL = {"number": 0, "state": "complete", "value": 0.5, "point": ["job.x='a=b'"], "folder": "0",
         "why": None}  # fmt: skip
FOUND = {
    "search": "tpe", "objective": "loss", "maximize": False, "wanted": 2, "best": 0,
    "trials": [TRIAL, TRIAL | {"number": 1, "state": "failed", "value": None, "folder": None}],
    "line": {"overrides": [], "config_dir": None, "config_name": "config", "folder": "/"},
}  # fmt: skip


def test_a_search_is_read_back(tmp_path, screen):
    assert search_of(tmp_path) is None
    write_json(RunDir(tmp_path).search, FOUND)
    found = search_of(tmp_path)
    assert found == FOUND
    print_search(found, screen)
    assert "1 complete, 1 failed" in screen.text
    [run, failed] = with_trials([{"folder": "/sweep/0"}], found)
    assert run["trials"][0]["parameters"] == {"job.x": "'a=b'"}
    assert failed["state"] == "failed"
