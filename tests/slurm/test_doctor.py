"""`doctor --run` on a real SLURM: its settings, its partitions, a collective on its nodes."""

import json

from tests.slurm.runs import SHAPE, verb


def test_it_tells_of_the_cluster_and_sums_on_its_nodes(slurm, tmp_path):
    run = tmp_path / "run"
    where = ("+cluster=slurm_dev", f"cluster.slurm_conf={slurm.slurm_conf}", f"run.dir={run}")
    done = verb("doctor", "--run", "--json", *where, *SHAPE)
    assert done.returncode == 0, done.stdout + done.stderr
    told = {(one["about"], one["found"]): one for one in json.loads(done.stdout)}
    text = "\n".join(found for _, found in told)
    assert "main (default): 4 nodes, no time limit, UP" in text
    assert "ranks are not kept to their own cores" in text, "its TaskPlugin is task/none"
    assert "cred_expire" not in text, "which is 5 there"
    assert f"{run} was written here and read on 2 ranks on 2 nodes, and back" in text
    sums = [found for about, found in told if about == "collective"]
    assert len(sums) == 2
    assert all("GB/s a rank" in found for found in sums)
