"""Runs that share an allocation: how many, on what, and the script that starts them side by side.

The script is run by bash, with runs' own scripts that only say how they ended. Without SLURM.
"""

import copy
import json
import os
import signal
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.clusters.slurm.admission import Allowed, Each, Partition, Shape, Wanted, wanted
from orchestrator.clusters.slurm.admission import _holds as holds
from orchestrator.clusters.slurm.batch_script import Here, pack_script, share_script
from orchestrator.clusters.slurm.cluster import SlurmCluster
from orchestrator.clusters.slurm.handle import is_ours
from orchestrator.clusters.slurm.packing import (
    is_over,
    of_whole_jobs,
    on_a_node,
    others_left,
    together,
)
from orchestrator.clusters.slurm.status import WAITS, with_job
from orchestrator.config.composer import compose
from orchestrator.config.rules import pack_problems
from orchestrator.errors import START_AGAIN, ConfigError
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.status import from_folder
from orchestrator.slurm_client import Job
from tests.helpers import until

PLAIN = compose(["+cluster=slurm", "cluster.nodes=1"])
NO_LIMIT = Allowed(minutes=None, max_nodes=None, min_nodes=0, max_cpus=None)
SHAPES = st.builds(
    lambda cpus, memory, gpus: Shape(
        nodes=2, cpus=cpus, memory_mb=memory, gres={("gpu", "a"): gpus} if gpus else {}
    ),
    st.integers(1, 40), st.integers(1, 400), st.integers(0, 9),
)  # fmt: skip


@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=4),
    ranks=st.integers(1, 5),
    memory=st.none() | st.integers(1, 90),
    gpus=st.sampled_from([None, "1", "a:2"]),
)
def test_so_many_share_a_node_as_every_node_holds_that_holds_one_and_no_more(
    shapes, ranks, memory, gpus
):
    options = {"ntasks-per-node": str(ranks), "cpus-per-task": "1"}
    options |= {"mem": f"{memory}M"} if memory else {}
    options |= {"gpus-per-node": gpus} if gpus else {}

    def asked(count):
        return wanted(together(options, count), nodes=(1, 1), cpus=ranks * count)

    partition = Partition(
        name="p", nodes=9, is_default=True, state="UP", allows=NO_LIMIT, grace_s=None,
        shapes=tuple(shapes),
    )  # fmt: skip
    least, most = on_a_node(asked(1), [partition])
    able = [shape for shape in shapes if holds(shape, asked(1))]
    assert bool(able) == bool(least) == bool(most)
    if able:
        assert all(holds(shape, asked(least)) for shape in able)
        assert not all(holds(shape, asked(least + 1)) for shape in able)
        assert any(holds(shape, asked(most)) for shape in able)
        assert not any(holds(shape, asked(most + 1)) for shape in able)


def test_a_partition_that_gives_fewer_cpus_of_a_node_bounds_how_many_share_it():
    allows = Allowed(minutes=None, max_nodes=None, min_nodes=0, max_cpus=6)
    shape = Shape(nodes=1, cpus=64, memory_mb=1, gres={})
    partition = Partition(
        name="p", nodes=1, is_default=True, state="UP", allows=allows, grace_s=None,
        shapes=(shape,),
    )  # fmt: skip
    assert on_a_node(Wanted(each=Each(cpus=2)), [partition]) == (3, 3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sweep.pack=1"], "sweep.pack must be true, false, or how many"),
        (["sweep.pack=some"], "sweep.pack must be true, false, or how many"),
        (["sweep.pack=true", "cluster.nodes={min: 1, max: 2}"], "try cluster.nodes=2"),
        (["sweep.pack=4", "run.survive=true", "cluster.nodes=2"], "run.survive=true"),
        (["sweep.pack=4", "sweep.parallel=2"], "sweep.parallel=2: all points of an"),
        (["sweep.pack=true", "cluster.allocation=current"], "cluster.allocation=current"),
    ],
)
def test_what_packing_cannot_be_beside_is_refused_with_what_works(words, said):
    with pytest.raises(ConfigError, match=r"sweep\.pack") as refused:
        compose(["+cluster=slurm", *words])
    assert said in str(refused.value)


def test_a_search_begins_its_trials_one_by_one_so_none_share():
    config = copy.deepcopy(PLAIN)
    config.sweep.pack, config.sweep.search = 4, "grid"
    assert "leave sweep.pack out" in "".join(pack_problems(config))


def test_on_simulated_nodes_the_queue_packs_already():
    with pytest.raises(ConfigError, match="as many points run at once as the machine has room"):
        compose(["sweep.pack=true"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"slurm_flags": {"gres": "gpu:1"}}, "sbatch's --gres"),
        ({"slurm_flags": {"licenses": "x"}}, "sbatch's --licenses"),
        ({"srun_flags": {"mem-per-cpu": 7}}, "cluster.srun_flags.mem-per-cpu"),
        ({"srun_flags": {"over": True}}, "cluster.srun_flags.over"),  # as srun reads it
        ({"slurm_flags": {"nice": 5}, "srun_flags": {"mem-bind": "none"}}, None),
    ],
)
def test_what_nobody_knows_a_share_of_is_refused_before_the_scheduler_is_asked(
    tmp_path, monkeypatch, flags, said
):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    config = copy.deepcopy(PLAIN)
    config.sweep.pack, config.run.snapshot = True, False
    for name, value in flags.items():
        setattr(config.cluster, name, value)
    cluster = SlurmCluster(config)
    request = cluster.request(tmp_path / "0", 0)
    from orchestrator.clusters.slurm.packing import refuse_uncounted

    if said is None:
        refuse_uncounted(config, request.details["options"])
        return
    with pytest.raises(ConfigError, match=r"not known|said by the sweep") as refused:
        cluster.check(request)
    assert said in str(refused.value)


class Shared:
    """Four runs in a folder whose name needs quoting, and the script that they share."""

    def __init__(self, folder):
        self.sweep = folder / "a 'b' $c"
        self.told = folder / "python.told"
        python = folder / "python"
        python.write_text(f'#!/bin/bash\nprintf "<%s>" "$@" >>{self.told}\n')
        python.chmod(0o755)
        self.here = Here(python=str(python), folder=folder, package=folder / "code/orchestrator")

    def own(self, number, *lines):
        """What a run's own script does."""
        run = self.sweep / str(number)
        for name in ("submitit", "logs"):
            (run / name).mkdir(parents=True, exist_ok=True)
        (run / "submitit" / "003.sh").write_text("\n".join([*lines, ""]))
        return run

    def begin(self, **environment):
        runs = [self.sweep / name for name in "0123"]
        stated = {"comment": "it's $HOME", "nodes": "1"}
        script = self.sweep / "pack.sh"
        script.write_text(pack_script(runs, 3, stated, self.here))
        assert "#SBATCH --comment='it'\"'\"'s $HOME'\n" in script.read_text()
        return subprocess.Popen(
            ["bash", script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
            env={"PATH": os.environ["PATH"], "SLURM_JOB_ID": "77", **environment},
            # As a scheduler starts it, and not deaf to INT as a shell's background is.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )  # fmt: skip


@pytest.fixture
def shared(tmp_path):
    return Shared(tmp_path)


def end_of(process):
    said, _ = process.communicate(timeout=20)
    return process.returncode, said


def test_each_run_has_its_own_end_and_those_that_start_again_wait_for_the_others(shared):
    shared.own(0, "exit 0")
    shared.own(1, f"exit {START_AGAIN}")
    shared.own(2, "echo its own words", "exit 1")
    shared.own(3, "kill -9 $$")
    assert end_of(shared.begin())[0] == 1
    starter = shared.here.starter
    told = "".join(f"<{word}>" for word in (*starter, "again", shared.sweep, 3, " 1", " 3"))
    assert shared.told.read_text() == told
    assert (shared.sweep / "2/logs/batch.log").read_text() == "its own words\n"


def test_where_none_is_to_start_again_nobody_is_asked(shared):
    for number in range(4):
        shared.own(number, f"exit {number % 2}")
    assert end_of(shared.begin()) == (1, "")
    shared.own(1, "exit 0")
    shared.own(3, "exit 0")
    assert end_of(shared.begin()) == (0, "")
    assert not shared.told.exists()


@pytest.mark.parametrize("name", ["USR2", "TERM", "USR1", "HUP", "INT"])
def test_what_the_script_alone_is_sent_is_handed_on_to_every_run(shared, name):
    for number in range(4):
        note = 'while :; do sleep 0.05; done & wait=$!; touch "${0%/*}/begun"; wait'
        ended = f'trap \'kill $wait; echo "$name" >"${{0%/*}}/told"; exit {number}\' '
        traps = f"for name in TERM USR1 USR2 HUP; do {ended} $name; done"
        shared.own(number, traps, note)
    process = shared.begin()
    places = [shared.sweep / str(number) / "submitit" for number in range(4)]
    until(lambda: all((place / "begun").exists() for place in places), 20, "all to begin")
    process.send_signal(getattr(signal, f"SIG{name}"))
    assert end_of(process)[0] == 1
    assert all((place / "told").exists() for place in places)


def test_in_a_later_start_a_run_that_was_submitted_anew_is_left_alone(shared):
    for number, job in enumerate(("77", "78", None, "77")):
        run = shared.own(number, 'touch "${0%/*}/begun"')
        if job is not None:
            write_json(run / "handle.json", {"kind": "slurm", "job_id": job, "attempt": 3})
    assert end_of(shared.begin(SLURM_RESTART_COUNT="1"))[0] == 0
    begun = [(shared.sweep / str(n) / "submitit/begun").exists() for n in range(4)]
    assert begun == [True, False, False, True]
    assert end_of(shared.begin())[0] == 0, "handles are written after the first start"
    assert all((shared.sweep / str(n) / "submitit/begun").exists() for n in range(4))


def test_a_runs_own_script_asks_for_its_part_and_leaves_its_end_to_others(tmp_path):
    config = copy.deepcopy(PLAIN)
    config.cluster.gpus_per_node, config.cluster.memory_gib = "a:2", 1.5
    config.run.snapshot = False
    run = RunDir(tmp_path / "3")
    text = SlurmCluster(config).share_script(run.path, 0)
    for option in ("--exact", "--job-name=3", "--nodes=1", "--gpus-per-node=a:2", "--mem=1536M"):
        assert f"    {option} \\\n" in text
    assert '" share "$run" "$attempt" "$code" "$stop_signal"\ncode=$?\nexit $code' in text.replace(
        "node_entry.py share", 'node_entry.py" share'
    )
    assert "ORCHESTRATOR_BATCH_PID=$$" not in text, "that is the script's of the whole job"
    assert "#SBATCH" not in text
    config.cluster.memory_gib = None
    assert "    --mem=0 \\\n" in SlurmCluster(config).share_script(run.path, 0)
    plain = share_script(
        config, run, 0, Here(python="p", folder=tmp_path, package=tmp_path), ["-x"]
    )
    assert subprocess.run(["bash", "-n"], input=plain, text=True, check=False).returncode == 0


@pytest.fixture
def packed(tmp_path):
    """Three runs of one job."""
    runs = [RunDir(tmp_path / name) for name in "012"]
    for run in runs:
        run.create()
        pack = {"script": "004.sh", "runs": ["0", "1", "2", "../elsewhere"]}
        write_json(run.handle, {"kind": "slurm", "job_id": "9", "attempt": 0, "pack": pack})
    return runs


def over(run):
    run.result.write_text(json.dumps({"state": "finished", "updates": 1}))


def test_a_job_is_signalled_as_a_whole_where_all_that_is_left_of_it_is_to_end(packed):
    first, second, third = packed
    assert of_whole_jobs(dict.fromkeys(packed, "9")) == {"9"}
    assert of_whole_jobs({first: "9", second: "9"}) == set()
    over(third)
    assert of_whole_jobs({first: "9", second: "9"}) == {"9"}
    assert (is_over(third), is_over(first)) == (True, False)
    assert [run.path.name for run in others_left(first)] == ["1"]
    write_json(second.handle, {"kind": "slurm", "job_id": "10", "attempt": 1})
    assert not others_left(first), "one that was submitted anew is another job's"


def test_only_the_job_of_its_own_script_is_a_packed_runs(packed, tmp_path):
    script = tmp_path / "arrays" / "004.sh"
    assert is_ours(packed[0], Job(id="9", state="RUNNING", command=str(script)))
    assert not is_ours(packed[0], Job(id="8", state="RUNNING", command=str(script)))
    other = script.with_name("005.sh")
    assert not is_ours(packed[0], Job(id="9", state="RUNNING", command=str(other)))


def test_one_that_left_says_that_it_waits_for_the_others_and_one_that_ended_is_over(packed):
    first, second, third = packed
    for run in packed:
        run.begin_attempt()
    job = Job(id="9", state="RUNNING", nodes="n0")
    write_json(first.departure(0), {"why": "preempted", "updates": 3, "time": 1.0})
    found = {run: with_job(run, from_folder(run), job) for run in (first, second)}
    assert found[first].reason == WAITS
    assert found[second].reason != WAITS
    over(third)
    assert with_job(third, from_folder(third), job).state == "finished"
    over(second)
    alone = with_job(first, from_folder(first), job)
    assert alone.reason != WAITS, "nobody is left to wait for: the job is about to start again"
