"""A fork of the process that has imported the commands behaves as a new interpreter."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import helpers, warm

pytestmark = pytest.mark.whole_runs

ASKED = {
    "a plan": ("orchestrator", ("plan", helpers.TINY, "train.updates=2", "--json")),
    "a refusal": ("orchestrator.launch", ("job=digitz",)),
    "a relative folder": ("orchestrator", ("status", "nothing here")),
}


@pytest.mark.parametrize("asked", ASKED)
def test_it_says_and_ends_as_a_new_interpreter(tmp_path, asked):
    module, arguments = ASKED[asked]
    new = subprocess.run(
        helpers.command(*arguments, module=module),
        cwd=tmp_path,
        env=helpers.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    forked = helpers.call(*arguments, module=module, cwd=tmp_path)
    for name in ("returncode", "stdout", "stderr"):
        assert getattr(forked, name) == getattr(new, name)


def test_it_has_its_own_environment_folder_and_arguments_and_no_other(tmp_path):
    (tmp_path / "asked.py").write_text(
        "import atexit, os, sys\n"
        "if __name__ == '__main__':\n"
        "    print(sys.argv[1:], os.getcwd(), sorted(os.environ), os.listdir('/proc/self/fd'))\n"
        "    atexit.register(print, 'at its end')\n"
        "    raise SystemExit(len(sys.argv))\n"
    )
    done = warm.call("asked", ["one", "two"], cwd=tmp_path, env={"A": "b"}, timeout=helpers.LIMIT_S)
    files = [str(number) for number in range(4)]  # and the one that lists them
    assert done.stdout == f"{['one', 'two']} {tmp_path} {['A']} {files}\nat its end\n"
    assert (done.returncode, done.stderr) == (3, "")


def test_nodes_that_are_forks_look_and_compute_as_those_of_a_new_interpreter(tmp_path):
    line = (helpers.TINY, helpers.SMALL, "tracker=none", "train.updates=4")
    new = helpers.begin_anew(*line, f"run.dir={tmp_path / 'new'}")
    with ThreadPoolExecutor(1) as thread:
        slow = (*line, "job.pause_s=0.3", f"run.dir={tmp_path / 'forked'}")
        forked = thread.submit(helpers.call, *slow)
        preloaded = helpers.until(lambda: helpers.preloaded(tmp_path / "forked"))
        assert preloaded.ppid() != os.getpid()
        assert os.getsid(preloaded.pid) == preloaded.pid
        assert [file for file in preloaded.open_files() if "forked" not in file.path] == []
        assert forked.result().returncode == 0
    output, _ = new.communicate(timeout=helpers.LIMIT_S)
    assert new.returncode == 0, output
    found = [helpers.result(tmp_path / name)["weights_sha256"] for name in ("new", "forked")]
    assert found[0] == found[1]
    assert helpers.processes_of(tmp_path) == []
