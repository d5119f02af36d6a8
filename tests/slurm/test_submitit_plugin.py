"""The script of submitit's users on a real SLURM."""

import pytest

script_runs = pytest.importorskip("tests.submitit_plugin.script_runs")
pytestmark = [pytest.mark.slurm, pytest.mark.long]


def test_an_unmodified_script_runs_under_our_agents(slurm, tmp_path):
    conf = f"cluster.slurm_conf={slurm.slurm_conf}"
    lines = script_runs.run_script(
        tmp_path / "%j", f"slurm_dev {conf}", SLURM_CONF=str(slurm.slurm_conf)
    )
    script_runs.check(lines, tmp_path, queued=True)
