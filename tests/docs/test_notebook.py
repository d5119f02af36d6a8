"""The notebook of the tutorial, and the Python of its page, executed from top to bottom."""

import json
import subprocess
import sys

import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient

from orchestrator import list_runs
from tests.docs.printed import ROOT, python_blocks
from tests.helpers import LIMIT_S, environment, run_python

pytestmark = pytest.mark.long


def test_the_notebook_runs_and_shows_what_it_says(tmp_path, monkeypatch):
    for name, value in environment(JUPYTER_RUNTIME_DIR=str(tmp_path / "runtime")).items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(ROOT / "docs" / "tutorial" / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # it is kept without them
    client = NotebookClient(
        notebook,
        timeout=LIMIT_S,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    followed, plotted, resumed, loaded, swept, refused = outputs
    assert followed[0].data["text/plain"].startswith("update 60/60 ")  # one line, that was replaced
    assert not any("update" in output.data["text/plain"][:6] for output in followed[1:])
    assert followed[-1].data["text/plain"] == "'finished'"
    assert "image/png" in plotted[0].data
    assert 0.9 < float(resumed[-1].data["text/plain"]) < 1
    assert int(loaded[-1].data["text/plain"]) > 0
    assert swept[-1].data["text/plain"].count("(") == 3
    assert "did you mean 'updates'?" in refused[0].text


def page_blocks(folder):
    """Return the page's blocks of Python, and write its module `my_job`: the README's job."""
    page = "docs/how-to/notebooks.md"
    [job] = [p.text for p in python_blocks() if p.page == "README.md" and "class Line(" in p.text]
    (folder / "my_job.py").write_text(job)
    return [printed.text for printed in python_blocks() if printed.page == page]


def test_the_python_of_the_page_runs(tmp_path, monkeypatch):
    blocks = page_blocks(tmp_path)
    assert len(blocks) == 3
    done = run_python("\n".join(blocks), cwd=tmp_path)
    first, *rows, best = done.stdout.splitlines()
    assert first.startswith("finished ")
    assert [row.split()[0] for row in rows] == ["1", "2", "4"]
    assert best.startswith(str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    digits = next(run for run in list_runs() if run.config["train"]["evaluate_every"] == 10)
    frame = digits.metrics.to_pandas()
    assert isinstance(frame, pd.DataFrame)
    assert frame["held_out.accuracy"].dropna().index.tolist() == [9, 19, 29, 39]
    assert frame["loss"].tolist() == digits.metrics["loss"]


def test_the_python_of_the_page_is_typed_strictly(tmp_path):
    blocks = page_blocks(tmp_path)
    more = """
print(run.metrics[-1]["loss"], run.logs(0, lines=3), run.state_dict(), run.load_model(best=True))
print(run.resume("train.updates=80").wait(timeout_s=60), run.cancel(), run.report().name)
print([each.state for each in orchestrator.list_runs("runs")], sweep.best("-loss").result)
"""
    (tmp_path / "script.py").write_text("\n".join([*blocks, more]))
    options = {"typeCheckingMode": "strict", "include": ["script.py"], "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(options))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "-p", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "0 errors" in done.stdout, done.stdout
