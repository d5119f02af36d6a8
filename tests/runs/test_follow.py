"""What shows a run never ends it."""

import pytest

from tests.helpers import SMALL, await_exit, begin_anew, until
from tests.programs import QUICK, WAITS, script

pytestmark = pytest.mark.whole_runs

SPEAKS = f"""{QUICK}
os.write(1, "caf\\ufffd \\u2192 done\\n".encode())
os.write(1, bytes([0x63, 0xe9, 10]))
{WAITS}
print("went on", flush=True)
"""


def test_no_file_and_no_character_that_cannot_be_shown_ends_a_run(tmp_path):
    script(tmp_path, SPEAKS)
    run = tmp_path / "run"
    words = ("run", "-v", SMALL, "cluster.nodes=1", f"run.dir={run}", "--", "train.py")
    process = begin_anew(
        *words, module="orchestrator", cwd=tmp_path, PYTHONIOENCODING="latin-1:strict"
    )
    until((tmp_path / "here-0").exists)
    shown = []
    while "c?\n" not in shown:
        shown.append(process.stdout.readline())
        assert process.poll() is None, shown
    assert "caf? ? done\n" in shown
    log, kept = run / "logs" / "rank-00000.log", run / "logs" / "kept"
    log.rename(kept)
    log.symlink_to(kept)
    while "is a link" not in shown[-1]:
        shown.append(process.stdout.readline())
        assert process.poll() is None, shown
    log.unlink()
    kept.rename(log)
    (tmp_path / "go").touch()
    assert "went on" in await_exit(process, 0)
