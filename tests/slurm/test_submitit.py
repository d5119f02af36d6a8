"""An unmodified script of submitit on SLURM, as runs of ours."""

from tests.end_to_end.test_submitit import check, run_script


def test_an_unmodified_script_runs_under_our_agents(slurm, tmp_path):
    conf = f"cluster.slurm_conf={slurm.slurm_conf}"
    lines = run_script(tmp_path / "%j", f"slurm_dev {conf}", SLURM_CONF=str(slurm.slurm_conf))
    check(lines, tmp_path, queued=True)
