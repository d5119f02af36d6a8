"""What runs beside the tests of SLURM gives way to them."""

import os
import sys

import pytest

from tests import gate

GROUPS = 'import os; print(open("/proc/self/cgroup").read(), "nice", os.nice(0))'


def test_what_runs_beside_has_the_least_share_and_its_end_is_told(capsys):
    with gate.left_over() as group:
        if group is None and os.geteuid() == 0:
            pytest.fail("root can make no cgroup here")
        beside = gate.Beside("a command", (sys.executable, "-c", GROUPS), group)
        assert beside.told() == 0
        beside.end()
    said = capsys.readouterr().out
    assert "nice 19" in said
    if group is not None:
        assert f"/{group.name}" in said
        assert not group.exists()
