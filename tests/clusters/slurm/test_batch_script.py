"""The batch script: what bash does with it, its golden texts, and values that are hostile."""

import copy
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.clusters.slurm.batch_script import (
    SECOND,
    STARTER,
    WAIT,
    SubmitHost,
    batch_script,
)
from orchestrator.clusters.slurm.safe_values import (
    OWN_FLAGS,
    OWN_SRUN_FLAGS,
    PATTERNS,
    check_preamble,
    check_values,
)
from orchestrator.config.composer import compose
from orchestrator.config.schema import Config, gpu_count
from orchestrator.errors import START_AGAIN, ConfigError
from orchestrator.rundir import files
from orchestrator.rundir.folder import RunDir
from tests.helpers import LIMIT_S, alive, until
from tests.programs import script
from tests.refusals import mentions, refused

pytestmark = pytest.mark.whole_runs

SAYS = """\
#!/bin/bash
{{ echo "$0"; printf '<%s>' "$@"; echo; echo "CODE=$ORCHESTRATOR_PYTHONPATH A=$A"; }} >>{calls}
exit {code}
"""

# For a child of the script: to wait for something for as long as that lives, as for its watcher,
# which ignores USR2 soon after it is forked.
AWAIT = """\
await() { until "$@"; do kill -0 $PPID || exit; sleep 0.1; done; }
has_watcher() {
    read -r watcher ignored _ < <(
        ps -o pid=,ignored=,stat= --ppid $PPID | grep -vw $$ | grep -v Z
    ) && ((0x$ignored & 0x800))
}
"""


PLAIN = compose(["+cluster=slurm"])


def slurm_config(**cluster) -> Config:
    config = copy.deepcopy(PLAIN)
    for name, value in cluster.items():
        setattr(config.cluster, name, value)
    return config


class Script:
    """One run of a batch script. Its srun ends with `code`, its python, which finalizes it, with
    `finalizes`; both say what they are asked.

    `before`: what befalls its folder.
    """

    def __init__(self, folder, config, *, code=0, finalizes=0, before=lambda _: None, **variables):
        self.run = RunDir(folder / "run")
        self.run.create()
        self.run.submitit.mkdir()
        self.calls = {"srun": folder / "srun.calls", "python": folder / "python.calls"}
        for name, calls in self.calls.items():
            program = folder / name
            program.write_text(SAYS.format(calls=calls, code=code if name == "srun" else finalizes))
            program.chmod(0o755)
        self.here = SubmitHost(
            python=str(folder / "python"),
            folder=folder,
            package=folder / "code/orchestrator",
            path=(folder / "code",),
        )
        check_values(config, self.run.path)
        check_preamble(config.cluster.preamble)
        before(self.run)
        script = folder / "003.sh"
        script.write_text(batch_script(config, self.run, 3, self.here))
        self.done = subprocess.run(
            ["bash", script],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=folder,
            check=False,
            timeout=LIMIT_S,
            env={"PATH": f"{folder}:{os.environ['PATH']}", "SLURMD_NODENAME": "n0", **variables},
        )

    def words(self, program: str) -> str:
        calls = self.calls[program]
        return calls.read_text() if calls.exists() else ""


@pytest.mark.parametrize(("survive", "code"), [(True, 0), (False, 1)])
def test_srun_ends_no_node_for_another_and_the_end_gives_the_jobs_code(tmp_path, survive, code):
    config = slurm_config(requeue=True)
    config.run.survive = survive
    script = Script(tmp_path, config, code=137, finalizes=code)
    assert script.done.returncode == code, script.done.stderr
    assert "<--kill-on-bad-exit=0><--wait=0>" in script.words("srun")
    assert ("<--no-kill>" in script.words("srun")) == survive
    sbatch = batch_script(config, script.run, 3, script.here)
    assert ("#SBATCH --no-kill" in sbatch) == survive


def test_an_srun_that_waits_for_a_silent_node_is_ended_after_the_outcome(tmp_path, monkeypatch):
    # Long enough for bash to run a trap on a busy machine before the signal that none can catch.
    monkeypatch.setattr("orchestrator.clusters.slurm.batch_script.SRUN_GRACE_S", 2)

    def hang(run: RunDir) -> None:
        outcome = f'"{run.attempts}/003/outcome.json"'
        (tmp_path / "srun").write_text(
            f"#!/bin/bash\ntrap 'echo USR2 >{tmp_path}/heard' USR2\ntrap 'exit 143' TERM\n"
            f"touch {outcome}\nwhile :; do sleep 0.1; done\n"
        )

    script = Script(tmp_path, slurm_config(), before=hang)
    assert (tmp_path / "heard").read_text() == "USR2\n", "first the way to end with the others"
    assert "<003><143>" in script.words("python")


def test_a_stopped_script_srun_or_last_step_is_continued(tmp_path, monkeypatch):
    monkeypatch.setattr("orchestrator.clusters.slurm.batch_script.STOPPED_S", 1)

    def stop(run: RunDir) -> None:
        for name, stopped in (("srun", "$PPID $$"), ("python", "$PPID $$")):
            with (tmp_path / name).open("a") as program:
                program.write(f"{AWAIT}\nawait has_watcher; kill -STOP {stopped}; exit 4\n")
            text = (tmp_path / name).read_text().replace("exit 0\n", "", 1)
            (tmp_path / name).write_text(text)

    script = Script(tmp_path, slurm_config(), before=stop)
    assert script.done.returncode == 4, script.done.stderr
    assert "<003><4>" in script.words("python")
    assert script.done.stdout.count("stopped") == 2, "it says so of srun, and of the last step"


def test_a_stop_in_the_last_step_starts_no_rank_of_the_next_attempt(tmp_path):
    """The last step hears of it, since it may pause before that, and survives the signal itself."""

    def stop(run: RunDir) -> None:
        (tmp_path / "python").write_text(f"""\
#!/bin/bash
echo "$*" >>{tmp_path}/python.calls
[[ $* == *" 003 "* ]] || exit 3
echo 1 >{run.attempts}/srun-restarts-7
kill -TERM $PPID $$
read -rt {LIMIT_S} && exit {START_AGAIN}
""")

    script = Script(tmp_path, slurm_config(), code=7, before=stop, SLURM_JOB_ID="7")
    assert script.done.returncode == 3, script.done.stderr
    assert script.words("srun").count("<--unbuffered>") == 1
    _, second = script.words("python").splitlines()
    assert second.endswith(f"after {script.run.path} 004 143 TERM")


def test_a_signal_to_all_processes_of_the_job_leaves_the_watcher_of_srun(tmp_path):
    again = tmp_path / "again"

    def signal_all(run: RunDir) -> None:
        (tmp_path / "srun").write_text(f"""\
#!/bin/bash
case "$*" in *--overlap*) touch {again}; exit;; esac
trap '' USR2
{AWAIT}
await has_watcher
kill -USR2 $PPID $watcher
echo n2 >"{run.attempts}/003/start-agent-00002"
await [ -e {again} ]
""")

    Script(tmp_path, slurm_config(), before=signal_all)
    assert again.exists()


def test_a_second_step_in_the_allocation_overlaps_the_first_which_may_still_be_listed(tmp_path):
    def count(run: RunDir) -> None:
        (run.attempts / "srun-restarts-7").write_text("1\n")

    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    for again, before in enumerate((lambda _: None, count)):
        (folder := tmp_path / str(again)).mkdir()
        script = Script(folder, slurm_config(), before=before, **job)
        calls = [line for line in script.words("srun").splitlines() if "<--" in line]
        assert ["<--overlap>" in call for call in calls if "<--unbuffered>" in call] == [
            bool(again)
        ]
        assert sum("<--immediate=1>" in call for call in calls) == again, "steps can be made"


def test_an_attempt_that_starts_on_a_full_disk_waits_for_space(tmp_path, disk):
    room = disk.folder / "attempts" / "003" / "room"

    def fill(run: RunDir) -> None:
        shutil.copytree(run.path, disk.folder, dirs_exist_ok=True)
        shutil.rmtree(run.path)
        run.path.symlink_to(disk.folder)
        disk.fill()
        threading.Thread(target=make_room).start()

    def make_room() -> None:
        until(room.exists, what="the first try")
        first = room.stat().st_mtime_ns
        until(lambda: room.stat().st_mtime_ns > first, what="the second one")
        disk.make_room()

    script = Script(tmp_path, slurm_config(), before=fill)
    assert script.done.returncode == 0, script.done.stderr
    assert script.done.stdout.count("No space left on device") == 1
    assert "<003><0>" in script.words("python")
    assert not room.exists()


# Of each job: the recorded one, whether that lives, whether a submission is going on, whether it
# may start.
OWNERS = {
    "recorded": ("8", True, None, True),
    "another lives": ("9", True, None, False),
    "another has ended": ("9", False, None, True),
    "to be recorded": ("9", True, "submitting.json", True),
    "element to be recorded": ("9", True, "../submitting.json", True),
    "never recorded": (None, True, None, True),
}


def test_a_job_waits_for_its_record_while_a_submission_is_going_on(tmp_path):
    """A controller made it after its answer was lost; another one is being made and recorded."""
    script(tmp_path, "#!/bin/bash\necho 9\n", "squeue", run=True)

    def record(run: RunDir) -> None:
        run.submitting.write_text("")
        # `sed` reads the record: from its second call on there is one.
        sed = f"""#!/bin/bash
[ -e {tmp_path}/looked ] && mv {run.handle}.new {run.handle} && rm {run.submitting}
touch {tmp_path}/looked
exec /usr/bin/sed "$@"
"""
        files.write_json(run.handle, {"kind": "slurm", "job_id": "9", "attempt": 3})
        run.handle.rename(f"{run.handle}.new")
        script(tmp_path, sed, "sed", run=True)

    ended = Script(tmp_path, slurm_config(), before=record, SLURM_JOB_ID="8").done
    assert mentions(ended.stderr, "job (8) job 9"), ended.stderr
    assert not (tmp_path / "srun.calls").exists()


@pytest.mark.parametrize("case", OWNERS)
def test_a_job_starts_nothing_while_another_one_is_recorded_and_lives(tmp_path, monkeypatch, case):
    monkeypatch.setattr("orchestrator.clusters.slurm.batch_script.RECORD_S", 1)
    recorded, lives, submission, starts = OWNERS[case]

    def befall(run: RunDir) -> None:
        if recorded is not None:
            files.write_json(run.handle, {"kind": "slurm", "job_id": recorded, "attempt": 3})
        if submission is not None:
            (run.path / submission).write_text("")
        squeue = tmp_path / "squeue"
        answer = f"[ ${{@: -1}} = 9 ] && {str(lives).lower()} && echo 9"
        squeue.write_text(f"#!/bin/bash\necho a banner\n{answer}\n")
        squeue.chmod(0o755)

    script = Script(tmp_path, slurm_config(), before=befall, SLURM_JOB_ID="8")
    assert bool(script.words("srun")) == starts, script.done.stderr
    assert bool(script.words("python")) == starts
    assert script.done.returncode == (0 if starts else 1)
    assert mentions(script.done.stderr, "job (8) job 9") is not starts, script.done.stderr


def test_an_attempt_whose_folder_cannot_be_made_fails_at_once(tmp_path):
    def occupy(run: RunDir) -> None:
        (run.attempts / "003").write_text("")

    script = Script(tmp_path, slurm_config(), before=occupy)
    assert script.done.returncode == 1
    assert re.search("^error: mkdir: .*File exists", script.done.stderr, re.MULTILINE)


def test_a_lost_agent_is_started_again_on_its_node_alone(tmp_path):
    again = tmp_path / "again"

    def lose(run: RunDir) -> None:
        (tmp_path / "srun").write_text(f"""\
#!/bin/bash
case "$*" in *--overlap*)
    echo "$ORCHESTRATOR_NODE_INDEX $A $*" >{again}.part; mv {again}.part {again}; exit;;
esac
echo n2 >"{run.attempts}/003/start-agent-00002"
until [ -e {again} ]; do sleep 0.05; done
""")

    preamble = ["set -euo pipefail", "set -- of the preamble", "export A=of-the-preamble"]
    config = slurm_config(preamble=preamble, ranks_per_node=3, cpus_per_rank=2)
    script = Script(tmp_path, config, before=lose)
    assert "<003><0>" in script.words("python")
    index, variable, *words = again.read_text().split()
    assert (index, variable) == ("00002", "of-the-preamble")
    assert words.index("--ntasks-per-node=1") < words.index("--overlap")
    assert {"--nodes=1", "--nodelist=n2", f"--output={script.run.logs}/node2.log"} <= {*words}
    assert words[-2:] == ["node", str(script.run.submitit)]
    assert "of" not in words
    assert not script.run.start_agent(3, 2).exists()
    assert (script.run.attempt(3) / "srun-00002.log").exists()


OWN_NAMES = (
    "run",
    "attempt",
    "code",
    "stop_signal",
    "name",
    "PYTHONPATH",
    "python",
    "srun",
    "pid",
    "status",
    "signal",
    "IFS",
    "BASH_ENV",
    "HOME",
    "trap",
)


def test_no_variable_of_the_persons_reaches_the_scripts_own_part(tmp_path):
    config = slurm_config(environment=dict.fromkeys(OWN_NAMES, "/elsewhere"))
    config.cluster.preamble = [f"{name}=/elsewhere" for name in OWN_NAMES] + ["trap 'exit 5' EXIT"]
    script = Script(tmp_path, config, code=7)
    assert script.done.returncode == 0, script.done.stderr
    said = script.words("python")
    assert f"<after><{script.run.path}><003><7>" in said
    assert f"CODE={tmp_path}/code A=" in said
    assert script.run.srun_log(3).exists()


@pytest.mark.parametrize(
    ("preamble", "code", "starts"),
    [
        (["set -euo pipefail"], 0, True),
        (["set -euo pipefail", "false", "export A=1"], 1, False),
        (["set -e", "A=$(false)"], 1, False),
        (["exit 9"], 9, False),
        (["export PYTHONPATH=/site/python"], 0, True),
        (["unset PYTHONPATH", "set -u"], 0, True),
        (["cd /", "umask 0", "exec 2>/dev/null"], 0, True),
        (["shopt -s extglob", "case x in @(x|y)) export A=2;; esac"], 0, True),
        (["cat <<END >/dev/null", "never ended"], 0, True),
        (["cat", "END_OF_PREAMBLE() { :; }", "export A=3"], 0, True),
        (["END_OF_PREAMBLE"], 0, True),
        (["python() { exit 1; }", "export -f python", "alias srun=false"], 0, True),
    ],
)
def test_after_any_preamble_the_run_is_finalized_with_its_code(tmp_path, preamble, code, starts):
    script = Script(tmp_path, slurm_config(preamble=preamble), PYTHONPATH="/login/python")
    assert script.done.returncode == 0, script.done.stderr
    assert f"<after><{script.run.path}><003><{code}>" in script.words("python")
    assert bool(script.words("srun")) == starts
    if starts:
        assert f"CODE={tmp_path}/code" in script.words("srun")


def test_no_rank_starts_without_its_preamble(tmp_path, disk):
    """Bash writes a long one to a temporary file, which a full disk does not take."""
    disk.fill()
    config = slurm_config(preamble=["export A=of-the-preamble", f"# {'x' * 200_000}"])
    script = Script(tmp_path, config, TMPDIR=str(disk.folder))
    assert f"<after><{script.run.path}><003><1>" in script.words("python")
    assert not script.words("srun")
    assert mentions(script.done.stderr, f"cluster.preamble {disk.folder} n0"), script.done.stderr


def test_no_lost_agent_is_started_again_without_its_preamble(tmp_path, disk):
    def lose(run: RunDir) -> None:
        attempt = run.attempts / "003"
        (tmp_path / "srun").write_text(f"""\
#!/bin/bash
case "$*" in *--overlap*) touch {tmp_path}/again;; esac
cat /dev/zero >{disk.folder}/filler 2>/dev/null
echo n2 >"{attempt}/start-agent-00002"
until grep -qs cluster.preamble "{attempt}/srun-00002.log" || [ -e {tmp_path}/again ]; do
    kill -0 $PPID || exit
    sleep 0.1
done
""")

    config = slurm_config(preamble=["export A=of-the-preamble", f"# {'x' * 200_000}"])
    script = Script(tmp_path, config, before=lose, TMPDIR=str(disk.folder))
    assert "<003><0>" in script.words("python")
    assert not (tmp_path / "again").exists()
    said = (script.run.attempt(3) / "srun-00002.log").read_text()
    assert mentions(said, f"cluster.preamble {disk.folder} n0"), said


SITE = "set -euo pipefail; set -fC"  # as in a BASH_ENV


@pytest.mark.parametrize(
    "shell", [{"POSIXLY_CORRECT": "1"}, {"SHELLOPTS": "errexit:nounset"}, {"BASH_ENV": "site.sh"}]
)
def test_what_bash_was_told_before_the_script_costs_neither_sruns_code_nor_its_end(tmp_path, shell):
    (tmp_path / "site.sh").write_text(SITE)
    script = Script(tmp_path, slurm_config(), code=7, A="1", **shell)
    assert script.done.returncode == 0, script.done.stderr
    assert not script.done.stderr
    assert f"<after><{script.run.path}><003><7>" in script.words("python")


PATHS = (
    "attempts",
    "attempts/003",
    "attempts/003/srun.log",
    "logs",
    "code",
    "submitit",
    "submitit/7_submitted.pkl",
)


@pytest.mark.parametrize("path", PATHS)
def test_the_batch_script_follows_no_link(tmp_path, path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def befall(run):
        named = run.path / path
        (run.attempts / "003").mkdir()
        if os.path.lexists(named):
            files.remove(named)
        named.symlink_to(elsewhere)

    script = Script(tmp_path, slurm_config(), before=befall)
    assert script.done.returncode == 1
    assert mentions(script.done.stderr, f"error: {script.run.path / path} link"), script.done.stderr
    assert not script.words("srun")
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("preamble", [[")"], ["if true"], ["echo 'x"], ["fi; id"], ["done"]])
def test_a_preamble_that_bash_cannot_read_is_refused_before_it_is_queued(preamble):
    with refused(ConfigError, "cluster.preamble"):
        check_preamble(preamble)


def test_srun_starts_one_agent_on_each_node_with_the_sites_options_and_no_mpi(tmp_path):
    flags = {"mem-bind": "local", "exact": True, "label": False}
    config = slurm_config(srun_flags=flags, ranks_per_node=3, cpus_per_rank=2)
    words = Script(tmp_path, config).words("srun")
    assert "<--mem-bind=local><--exact>" in words
    assert "<--mpi=none>" in words
    assert "<--cpus-per-task=6><--ntasks-per-node=1>" in words
    assert "label" not in words
    flags = {"spread-job": True, "hold": False}
    more = {"gpus_per_node": "a100:4", "requeue": False}
    lines = text_of(tmp_path, slurm_flags=flags, **more).splitlines()
    wanted = ("spread-job", "gpus-per-node=a100:4", "no-requeue")
    assert {f"#SBATCH --{option}" for option in wanted} <= set(lines)
    assert not any("hold" in line for line in lines)


@pytest.mark.parametrize("own", [OWN_FLAGS, OWN_SRUN_FLAGS], ids=["sbatch", "srun"])
def test_an_option_of_ours_is_refused_in_every_abbreviation_that_slurm_takes(own):
    section = "slurm_flags" if own is OWN_FLAGS else "srun_flags"
    for name in own:
        for length in range(2, len(name) + 1):
            short = name[:length].rstrip("-")
            if short in ("gpus", "no", "nt"):
                continue
            with refused(ConfigError, f"cluster.{section}.{short}"):
                check_values(slurm_config(**{section: {short: "x"}}), Path("/run"))


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SBATCH_PARTITION", "SRUN_MPI", "UID"])
def test_a_jobs_own_variables_cannot_be_set_for_the_ranks(name):
    with refused(ConfigError, f"cluster.environment.{name}"):
        check_values(slurm_config(environment={name: "1"}), Path("/run"))


@pytest.mark.parametrize("cluster", ["slurm", "slurm_ascend", "slurm_dev"])
def test_users_sbatch_variables_decide_what_the_configuration_leaves_open(cluster, monkeypatch):
    for name in ("ACCOUNT", "CONSTRAINT", "PARTITION", "QOS", "RESERVATION"):
        monkeypatch.setenv(f"SBATCH_{name}", "theirs")
    script = script_of(compose([f"+cluster={cluster}", "cluster.account=mine"]))
    assert "#SBATCH --account=mine" in script
    for name in ("constraint", "partition", "qos"):
        assert f"#SBATCH --{name}=theirs" in script
    assert "reservation" not in script
    monkeypatch.setenv("SBATCH_QOS", "")
    assert "--qos" not in script_of(compose([f"+cluster={cluster}"]))


@pytest.mark.parametrize(
    ("written", "key", "value"),
    [
        ("cluster.exclude=n[1-2],n7", "exclude", "n[1-2],n7"),
        ("cluster.gpus_per_node=a100:2,h100:2", "gpus_per_node", "a100:2,h100:2"),
        ("+cluster.slurm_flags.mail-type=END,FAIL", "slurm_flags", {"mail-type": "END,FAIL"}),
        ("cluster.constraint=a&b|c", "constraint", "a&b|c"),
        ("cluster.constraint=[a|b]", "constraint", "[a|b]"),
        ("cluster.constraint=[a*2&b*2]&c", "constraint", "[a*2&b*2]&c"),
        ("+cluster.srun_flags.mem-bind=v,local", "srun_flags", {"mem-bind": "v,local"}),
    ],
)
def test_lists_are_written_as_for_sbatch(written, key, value):
    assert getattr(compose(["+cluster=slurm", written]).cluster, key) == value


@pytest.mark.parametrize("gpus", ["four", "a100:", ":4", -1, True, "a100:4;id", 1.5])
def test_what_is_no_number_of_gpus_is_refused(gpus):
    with refused(ConfigError, f"cluster.gpus_per_node a100:4 {gpus!r}"):
        gpu_count(gpus)


def test_a_slurm_conf_by_relative_path_would_not_be_found_from_another_folder():
    for conf in ("/etc/slurm.conf", "~/slurm.conf"):
        check_values(slurm_config(slurm_conf=conf), Path("/run"))
    absolute = f"cluster.slurm_conf={Path.cwd()}/etc/slurm.conf"
    with refused(ConfigError, f"cluster.slurm_conf=etc/slurm.conf {absolute}"):
        check_values(slurm_config(slurm_conf="etc/slurm.conf"), Path("/run"))


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("true", "#SBATCH --exclusive"),
        ("user", "#SBATCH --exclusive=user"),
        ("mcs", "#SBATCH --exclusive=mcs"),
        ("false", None),
        ("null", None),
    ],
)
def test_nodes_are_exclusive_in_each_of_sbatchs_ways(value, line):
    config = compose(["+cluster=slurm", f"cluster.exclusive={value}"])
    check_values(config, RUN)
    lines = [text for text in script_of(config).splitlines() if "--exclusive" in text]
    assert lines == ([line] if line else [])


def test_another_way_of_exclusive_nodes_is_refused_with_those_that_there_are():
    with refused(ConfigError, "cluster.exclusive true false user mcs 'users'"):
        check_values(compose(["+cluster=slurm", "cluster.exclusive=users"]), RUN)
    config = compose(["+cluster=slurm", "cluster.slurm_flags.exclusive=user"])
    with refused(ConfigError, "cluster.slurm_flags.exclusive cluster.exclusive=true =user =mcs"):
        check_values(config, RUN)


def test_a_little_memory_is_not_all_of_it():
    text = script_of(slurm_config(memory_gib=0.0004))
    assert re.findall(r"--mem=(\w+)", text)
    assert {*re.findall(r"--mem=(\w+)", text)} == {"1M"}


def text_of(tmp_path, **cluster):
    submit_host = SubmitHost(
        python="/usr/bin/python3",
        folder=tmp_path / "here",
        package=tmp_path / "code/orchestrator",
        path=(tmp_path / "code", tmp_path / "here/lib"),
    )
    return batch_script(slurm_config(**cluster), RunDir(tmp_path / "run"), 2, submit_host)


def test_a_container_sees_the_run_the_code_and_where_the_person_stands(tmp_path):
    folders = [tmp_path / name for name in ("code", "here", "run")]
    python = f"python3 -u -P {tmp_path / 'code/orchestrator' / STARTER}"
    image = {"container": "/images/a.sqsh"}
    pyxis = text_of(tmp_path, **image, container_runtime="pyxis")
    mounts = ",".join(f"{folder}:{folder}" for folder in folders)
    for words in (
        "--container-image=/images/a.sqsh",
        f"--container-mounts={mounts}",
        f"--container-workdir={folders[1]}",
        python,
    ):
        assert f"    {words} \\" in pyxis.splitlines()
    flags = {"container-mounts": "/data:/data:ro,/scratch", "container-writable": True}
    more = text_of(tmp_path, **image, container_runtime="pyxis", srun_flags=flags)
    [option] = [line.strip() for line in more.splitlines() if "--container-mounts" in line]
    assert option == f"--container-mounts={mounts},/data:/data:ro,/scratch \\"
    assert "    --container-writable \\" in more.splitlines()
    plain = text_of(tmp_path, **image, container_runtime="apptainer")
    binds = "--bind=" + ",".join(map(str, folders))
    assert f"    apptainer exec {binds} /images/a.sqsh {python} \\" in plain.splitlines()
    gpus = text_of(tmp_path, **image, container_runtime="apptainer", gpus_per_node=2)
    with_gpus = f"    apptainer exec --nv {binds} /images/a.sqsh {python} \\"
    assert with_gpus in gpus.splitlines()
    bare = text_of(tmp_path)
    assert f"    /usr/bin/{python} \\" in bare.splitlines()
    # The script's last line runs outside the container.
    assert all("if ! [ -x /usr/bin/python3 ]" in script for script in (bare, pyxis, plain))


def test_nothing_of_a_killed_script_waits_for_srun(tmp_path):
    (tmp_path / "attempts" / "000").mkdir(parents=True)
    text = "\n".join(
        [
            f"run={tmp_path} attempt=000 stop_signal= ; exec 9>/dev/null",
            *SECOND.lines(),
            "start_ranks() {  # in the place of srun",
            "exec sleep 300",
            *WAIT.lines(SRUN_GRACE_S=300, first="USR2"),
        ]
    )
    script = subprocess.Popen(["bash", "-c", text], start_new_session=True)
    own = psutil.Process(script.pid)

    def kinds():
        return sorted(child.name() for child in own.children())

    try:
        until(lambda: kinds() == ["bash", "sleep"], what="srun and its watcher")
        [watcher] = [child for child in own.children() if child.name() == "bash"]
        (tmp_path / "attempts" / "000" / "outcome.json").touch()
        until((tmp_path / "attempts" / "000" / "finalizing").exists, what="a look at the outcome")
        script.kill()
        script.wait()
        until(lambda: not alive(watcher.pid), what="the watcher's end")
    finally:
        os.killpg(script.pid, signal.SIGKILL)


# ------------------------------------------------------------------ The script as a value


GOLDEN = Path(__file__).parents[2] / "golden"
RUN = Path("/shared/runs/one")
HERE = SubmitHost(
    python="/shared/venv/bin/python",
    folder=Path("/shared/project"),
    package=RUN / "code/000/0/orchestrator",
    path=(RUN / "code/000/0", Path("/shared/project")),
    code=RUN / "code/000",
)
GOLDEN_REQUESTS = {
    "dev": ["+cluster=slurm_dev"],
    "one_node_8_gpus": [
        "+cluster=slurm",
        "cluster.nodes=1",
        "cluster.ranks_per_node=8",
        "cluster.gpus_per_node=8",
        "cluster.cpus_per_rank=12",
        "cluster.memory_gib=480",
        "cluster.exclusive=true",
        "cluster.partition=gpu",
        "cluster.account=vision",
        "cluster.time_min=1440",
        "+cluster.container=/images/torch.sif",
        "+cluster.container_runtime=apptainer",
    ],
    "30_nodes_8_gpus_nccl": [
        "+cluster=slurm",
        "experiment=jepa_240",
        "cluster.nodes=30",
        "cluster.ranks_per_node=8",
        "cluster.gpus_per_node=8",
        "cluster.cpus_per_rank=12",
        "cluster.partition=gpu",
        "cluster.qos=long",
        "cluster.constraint='a100&ib'",
        "cluster.exclude='gpu[17,23-25]'",
        "+cluster.slurm_flags.reservation=team",
        "+cluster.slurm_flags.comment='predictive pretraining, part 2'",
        "cluster.signal_ahead_s=300",
        "cluster.time_min=2880",
        "transport=nccl",
        "run.name=jepa",
        "+cluster.slurm_flags.mail-type=FAIL",
        "+cluster.slurm_flags.switches=1",
        "cluster.preamble=[module load cuda/12.4]",
        "+cluster.environment.NCCL_SOCKET_IFNAME=ib0",
    ],
    "ascend_hccl": ["+cluster=slurm_ascend", "cluster.partition=npu"],
}


def script_of(config: Config, run: Path = RUN) -> str:
    check_values(config, run)
    return batch_script(config, RunDir(run), 0, HERE)


@pytest.mark.parametrize("name", GOLDEN_REQUESTS)
def test_a_known_request_makes_the_golden_script_which_bash_can_read(name):
    golden = GOLDEN / f"{name}.sbatch"
    assert script_of(compose(GOLDEN_REQUESTS[name])) == golden.read_text()
    subprocess.run(["bash", "-n", golden], check=True)


TEXTS = [
    *(f"cluster.{name}" for name in PATTERNS),
    "run.name",
    "cluster.slurm_flags.mail-user",
    "cluster.environment.A",
    "cluster.slurm_conf",
    "run.dir",
    "cluster.slurm_flags.*",
    "cluster.environment.*",
    "cluster.srun_flags.mem-bind",
    "cluster.srun_flags.*",
    "cluster.gpus_per_node",
]
PIECES = [
    "\n",
    "\r",
    "\0",
    "\x1b",
    "\u2028",
    "$(touch pwned)",
    "`touch pwned`",
    "'",
    '"',
    "\\",
    ";",
    "&&",
    "|",
    ">",
    "--wrap=id",
    "-",
    " ",
    "#",
    "#SBATCH --uid=0",
    "$HOME",
    "${IFS}",
    "%j",
    "a",
    "gpu",
    "/",
    "=",
    ",",
    ":",
    "(",
    ")",
    "!",
    "*",
    "~",
    "é",
]
HOSTILE = st.one_of(
    st.text(min_size=1, max_size=12),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join),
)


def with_value(key: str, value: str) -> tuple[Config, Path]:
    config, run = slurm_config(), RUN
    if key == "run.dir":
        return config, Path("/shared/" + value)
    if key == "cluster.slurm_conf":
        value = "/shared/" + value
    section, name, *entry = key.split(".")
    if entry:
        table = getattr(getattr(config, section), name)
        table.update({value: "x"} if entry == ["*"] else {entry[0]: value})
    else:
        setattr(getattr(config, section), name, value)
    if key == "cluster.container":
        config.cluster.container_runtime = "pyxis"
    return config, run


@functools.cache
def harmless(key: str) -> list[str]:
    """Return the script with a harmless value."""
    script = script_of(*with_value(key, "4" if "gpus" in key else "x"))
    return [line.removesuffix(" \\") for line in script.splitlines()]


@pytest.mark.parametrize("key", TEXTS)
@settings(max_examples=60)
@given(value=HOSTILE)
def test_a_hostile_value_is_refused_or_inert(key, value):
    try:
        script = script_of(*with_value(key, value))
    except ConfigError:
        return
    if key == "cluster.gpus_per_node" and not gpu_count(value):
        return  # none are asked for, so nothing is written
    expected = harmless(key)
    lines = [line.removesuffix(" \\") for line in script.splitlines()]
    # As many lines as with a harmless value, each with as many words: it stayed one word.
    assert len(lines) == len(expected)
    for line, other in zip(lines, expected, strict=True):
        assert line.startswith("#SBATCH") == other.startswith("#SBATCH")
        if line.startswith(("#SBATCH", "export", "run=", "    --")):
            assert len(shlex.split(line, comments=False)) == len(shlex.split(other))
            for word in re.findall(r"[$`\\]", line.replace("_PID=$$", "")):
                assert key.startswith("cluster.environment"), word


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cluster.partition", "gpu\n#SBATCH --uid=0"),
        ("cluster.slurm_flags.comment", "a$(reboot)"),
        ("cluster.slurm_flags.comment", "--wrap=id"),
        ("cluster.account", "me;id"),
        ("run.name", 'x" --wrap="id'),
        ("cluster.slurm_flags.mail-user", "`id`"),
        ("cluster.container", "image --privileged"),
        ("run.dir", "a%j"),
        ("run.dir", "a'b"),
    ],
)
def test_an_injection_is_refused_with_the_keys_name(key, value):
    with pytest.raises(ConfigError, match=re.escape(key)):
        script_of(*with_value(key, value))


def test_what_a_person_may_well_mean_is_taken():
    config = slurm_config()
    config.cluster.slurm_flags = {"comment": "Größe 2, second try (a & b)"}
    config.cluster.constraint = "[rack1|rack2]&gpu"
    config.cluster.environment = {"GREETING": 'it\'s $HOME `x` "y"'}
    script = script_of(config, Path("/shared/my runs/über"))
    done = subprocess.run(
        [
            "bash",
            "-c",
            "\n".join(x for x in script.splitlines() if x.startswith("export G"))
            + '\nprintf %s "$GREETING"',
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == 'it\'s $HOME `x` "y"'
    assert "--comment='Größe 2, second try (a & b)'" in script
