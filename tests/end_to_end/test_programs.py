"""Programs run as they are: told who they are, attended from outside, ended with the run."""

import json
import os
import re
import signal
import sys
import time

import pytest

from orchestrator.config.program import with_newest_files
from tests import helpers
from tests.programs import ENDS, LOOP, QUICK, TORCH, WAITS, script

pytestmark = [pytest.mark.whole_runs, pytest.mark.long]

FOUR = ("cluster.nodes=2", "cluster.ranks_per_node=2")


def call(folder, *before, program=("train.py",), **env):
    arguments = (*FOUR, f"run.dir={folder / 'run'}", *before, "--", *program)
    return helpers.call("run", *arguments, module="orchestrator", cwd=folder, **env)


def begin(folder, *before, program=("train.py",), waits_for=4):
    arguments = (*FOUR, f"run.dir={folder / 'run'}", *before, "--", *program)
    process = helpers.begin("run", *arguments, module="orchestrator", cwd=folder)
    helpers.until(lambda: len(list(folder.glob("here-*"))) == waits_for, what="the program")
    return process


def log(folder, rank):
    return (folder / "run" / "logs" / f"rank-{rank:05d}.log").read_text()


def said(folder, rank):
    """Return the last line of JSON that the program printed."""
    return json.loads(re.findall(r"^\{.*\}$", log(folder, rank), flags=re.MULTILINE)[-1])


def programs_of(folder):
    """Processes that run a script of this folder."""
    return [p for p in helpers.processes_of(folder / "train.py") if p.is_running()]


def program_of(folder, rank):
    return next(p for p in programs_of(folder) if p.environ().get("RANK") == str(rank))


def culprit(folder):
    return helpers.result(folder / "run")["culprit"]


NAMES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCH")
TOLD = f"""
import json, os
said = json.dumps({{k: v for k, v in os.environ.items() if k.startswith({NAMES})}})
print(said + "\\n", end="", flush=True)
"""


def test_a_torch_script_ends_with_the_bits_that_it_has_under_torchrun_and_its_variables(tmp_path):
    script(tmp_path, TOLD + TORCH + ENDS)
    done = call(tmp_path, "cluster.ranks_per_node=1", "job.arguments.lr=0.2", code=0)
    assert re.search(r"state +finished", done.stdout)
    words = ("--nproc-per-node=2", "--max-restarts=2", "train.py", "--lr=0.2")
    printed = helpers.call(*words, module="torch.distributed.run", cwd=tmp_path).stdout
    weights = set(re.findall(r"final (.*)", printed))
    assert len(weights) == 1, printed
    for rank in range(2):
        assert set(re.findall(r"final (.*)", log(tmp_path, rank))) == weights
    theirs = json.loads(re.findall(r"^\{.*\}$", printed, flags=re.MULTILINE)[-1])
    theirs.pop("TORCHELASTIC_SIGNALS_TO_HANDLE")  # torchrun's note to itself

    four = tmp_path / "four"
    four.mkdir()
    script(four, TOLD)
    call(four, "run.max_restarts=2", code=0)
    ours = [said(four, rank) for rank in range(4)]
    assert ours[3].keys() == theirs.keys()
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "ROLE_NAME"):
        assert {one[name] for one in ours} == {theirs[name]}
    for rank, one in enumerate(ours):
        placed = {"RANK": rank, "LOCAL_RANK": rank % 2, "GROUP_RANK": rank // 2, "ROLE_RANK": rank}
        placed |= {"LOCAL_WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 2}
        placed |= {"WORLD_SIZE": 4, "ROLE_WORLD_SIZE": 4}
        assert {name: int(one[name]) for name in placed} == placed
        assert (one["TORCHELASTIC_RESTART_COUNT"], one["TORCHELASTIC_MAX_RESTARTS"]) == ("0", "2")
        assert one["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in ours}) == 1
    assert len({one["TORCHELASTIC_RUN_ID"] for one in ours}) == 1


# Told apart by it from those of other tests, also of another checkout.
SLEEP = f"1000.{os.getpid()}"

MISHAPS = f"""{QUICK}
print("x" * 1_000_000)
subprocess.Popen(["sleep", "{SLEEP}"], start_new_session=True)
os.chdir("/")
if what == "raise" and me:
    raise ValueError(f"the script\\nfails on rank {{rank}}")
if what == "record" and me:
    from torch.distributed.elastic.multiprocessing.errors import record
    @record
    def main():
        raise KeyError("recorded by torch's record")
    main()
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("mishap", "rank", "cause"),
    [
        ("raise@2", 2, "ValueError: the script fails on rank 2 (exited with code 1)"),
        ("record@1", 1, 'KeyError: "recorded by torch\'s record" (exited with code 1)'),
    ],
)
def test_the_rank_that_fails_is_named_with_what_it_raised(tmp_path, mishap, rank, cause):
    script(tmp_path, MISHAPS)
    call(tmp_path, program=("train.py", mishap), code=1)
    found = culprit(tmp_path)
    assert (found["rank"], found["node"]) == (rank, f"node{rank // 2}")
    assert found["cause"].replace("'", '"') == cause.replace("'", '"')
    assert not [p for p in helpers.processes_of(SLEEP) if p.cmdline()[0] == "sleep"]


@pytest.mark.parametrize(
    ("target", "number", "said"),
    [
        ("rank", signal.SIGKILL, "rank 3 on node1 failed first: killed by signal 9 (SIGKILL)"),
        ("rank", signal.SIGSTOP, "rank 3 on node1 failed first: it was frozen (SIGSTOP)"),
        ("agent", signal.SIGKILL, "the run failed on node1: the node went away: its agent"),
        ("launcher", signal.SIGKILL, ""),
    ],
)
def test_killed_or_frozen_rank_is_reported(tmp_path, target, number, said):
    script(tmp_path, QUICK + WAITS)
    process = begin(tmp_path, "cluster.heartbeat_timeout_s=3")
    rank = program_of(tmp_path, 3)
    began = time.monotonic()
    os.kill({"rank": rank.pid, "agent": rank.ppid(), "launcher": process.pid}[target], number)
    output, _ = process.communicate(timeout=helpers.LIMIT_S)
    helpers.until(lambda: not programs_of(tmp_path), what="the end of all")
    assert time.monotonic() - began < (30 if number == signal.SIGSTOP else 10)
    assert said in " ".join(output.split())
    assert process.returncode == (1 if said else -signal.SIGKILL)


STOPS = f"""{QUICK}
def stop(number, frame):
    print("stopped by", number, "in attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
    sys.exit(0 if rank else 7)
signal.signal(signal.SIGUSR1, stop)
{WAITS}
print("went on in attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
"""


def test_a_stop_is_the_signal_that_the_program_knows_and_resume_starts_it_again(tmp_path):
    script(tmp_path, STOPS)
    process = begin(tmp_path, "job.stop_signal=USR1")
    status = helpers.verb("status", tmp_path / "run", "--json")
    assert json.loads(status.stdout)[0]["state"] == "running"
    done = helpers.verb("cancel", tmp_path / "run", code=0)
    assert "gets SIGUSR1 on every rank" in done.stdout
    output = helpers.await_exit(process, 3, timeout=helpers.LIMIT_S)
    assert "gets SIGUSR1 on every rank" in output
    assert "boundary" not in output + done.stdout, "it has none"
    assert helpers.result(tmp_path / "run")["state"] == "stopped"
    assert all(
        f"stopped by {signal.SIGUSR1.value} in attempt 0" in log(tmp_path, r) for r in (0, 3)
    )
    assert "asked to stop, the program exited with code 7" in log(tmp_path, 0), "it is said"
    (tmp_path / "go").touch()
    helpers.verb("resume", tmp_path / "run", code=0)
    assert "went on in attempt 1" in log(tmp_path, 0)
    over = helpers.verb("resume", tmp_path / "run")
    assert "nothing to resume" in over.stdout
    assert "train.updates" not in over.stdout, "which is nothing to a program"


EARLY = f"""{QUICK}
from orchestrator import current_run as run
attempt = run.attempt
if attempt == 0:
    sys.stderr.write("no newline at the end")
    sys.exit(rank + 1)
mark = run.folder / f"left-{{attempt}}"
if rank == 1:
    if attempt == 2:
        for _ in range(64):
            sys.stdout.write("x" * 2**20)
        subprocess.Popen(["sh", "-c", "sleep {SLEEP} & sleep 0.2"], start_new_session=True)
        status = open(f"/proc/{{os.getppid()}}/status").read()
        kib = status.partition("VmHWM:")[2].split()[0]
        os.chdir("/")
        (run.folder / "peak").write_text(kib)
    mark.write_text(f"/proc/{{os.getpid()}}/exe")
    sys.exit(0)
while not mark.exists() or not mark.read_text() or os.path.lexists(mark.read_text()):
    time.sleep(0.02)
if attempt == 1 and rank == 2:
    raise ConnectionResetError("Connection reset by peer")
"""


def test_ranks_that_end_early_or_with_codes_of_their_own_or_say_too_much(tmp_path):
    """Three attempts: each ends with its own code; one leaves and another fails for want of it; one
    leaves children and 64 MiB without a line's end behind, and the others end as they should.
    """
    script(tmp_path, EARLY)
    words = (*FOUR, "run.dir=run", "run.max_restarts=2", "--", "train.py")
    done = helpers.call("run", *words, module="orchestrator", cwd=tmp_path, COLUMNS="200")
    output = done.stdout
    assert done.returncode == 0, output + done.stderr
    assert re.search(r"restarts +2", output)
    first = re.search(r"rank (\d) on node\d failed first: exited with code (\d)", output)
    assert int(first[2]) == int(first[1]) + 1
    assert re.search(r"rank 2 .*reset by peer.*; rank [\d, ]*1[\d, ]* had ended before", output)
    assert int((tmp_path / "run" / "peak").read_text()) < 200 * 1024, "what it says is not kept"
    node_log = (tmp_path / "run" / "logs" / "node0.log").read_text()
    assert "left running are ended" in node_log
    assert not [p for p in helpers.processes_of(SLEEP) if p.cmdline()[0] == "sleep"]


JOINS = f"""{QUICK}
from orchestrator import current_run
rendezvous = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == int(what):
    time.sleep(600)  # stuck, until it is killed
if rank == 0:
    server = socket.create_server(("", rendezvous[1]))
    taken = [server.accept() for _ in range(3)]
until = time.monotonic() + 60
while time.monotonic() < until:
    try:
        link = socket.create_connection(rendezvous)
        time.sleep(600)
    except OSError:
        time.sleep(0.5)
raise ConnectionRefusedError("Connection refused")
"""


@pytest.mark.parametrize(
    ("stuck", "cause"),
    [
        (3, r"it hangs: .*rank 3 is in <module> \(.*train.py, line 10\), and has not joined the"),
        (0, r"rank 0 is in <module> \(.*, line 10\), and has not opened the port where the ranks"),
    ],
)
def test_a_rank_that_never_joins_the_others_is_named(tmp_path, stuck, cause):
    """It hangs in an import; the others wait at the port, as torch's store has them do."""
    script(tmp_path, JOINS)
    program = ("train.py", str(stuck))
    call(tmp_path, "cluster.hang_timeout_s=8", program=program, code=1)
    assert culprit(tmp_path)["rank"] == stuck
    assert re.search(cause, culprit(tmp_path)["cause"])


LATE = f"""{QUICK}
place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == int(what):
    time.sleep(12)
if rank == 0:
    server = socket.create_server(("", place[1]))
    links = [server.accept()[0] for _ in range(3)]
    [link.sendall(b"x") for link in links]
while rank:
    try:
        link = socket.create_connection(place)
        break
    except OSError:
        time.sleep(0.2)
rank and link.recv(1)
print("met", flush=True)
"""


@pytest.mark.parametrize("late", [0, 3])
def test_a_rank_that_joins_late_is_waited_for_with_a_warning(tmp_path, late):
    script(tmp_path, LATE)
    limit = "cluster.rendezvous_timeout_s=2"
    done = call(tmp_path, limit, program=("train.py", str(late)), code=0)
    said = " ".join((done.stdout + done.stderr).split())
    assert "no rank has used a processor or written anything" in said
    assert f"rank {late} is in <module>" in said
    assert "met" in log(tmp_path, 0)


MISMATCHED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
def different():
    if dist.get_rank() == 0:
        dist.barrier()
    dist.all_reduce(x)
different()
"""


def test_ranks_in_different_collectives_are_ended_with_both_stacks(tmp_path):
    script(tmp_path, MISMATCHED)
    two = ("cluster.ranks_per_node=1", "cluster.hang_timeout_s=10")
    done = call(tmp_path, *two, code=1)
    said = " ".join((done.stdout + done.stderr).split())
    ranks = (
        r"rank 0 is in different \(.*train.py, line 8\), there in barrier .*rank 1 is in "
        r"different \(.*train.py, line 9\), there in all_reduce"
    )
    assert re.search(r"warning: for \d+ s no rank .*" + ranks, said)
    assert re.search("it hangs: .*" + ranks, culprit(tmp_path)["cause"])
    for rank in range(2):
        assert "in different\n" in log(tmp_path, rank)


STAYS = f"""{QUICK}
import threading
if me:
    threading.Thread(target=time.sleep, args=(600,), name="forgotten").start()
print("done", flush=True)
if what == "raise" and me:
    raise ValueError("no good")
"""


@pytest.mark.parametrize(("what", "code"), [("stay@1", 0), ("raise@1", 1)])
def test_a_program_that_is_done_and_does_not_exit_is_ended(tmp_path, what, code):
    script(tmp_path, STAYS)
    done = call(tmp_path, "cluster.hang_timeout_s=6", program=("train.py", what), code=code)
    assert "forgotten" in log(tmp_path, 1)
    if code:
        assert "ValueError: no good" in culprit(tmp_path)["cause"]
    else:
        said = " ".join((done.stdout + done.stderr).split())
        assert "rank 1: it was ended as finished: its work was done, and it did not exit" in said


WORKS_ON = f"""{QUICK}
import atexit, multiprocessing, threading
def send():
    for _ in range(40):
        time.sleep(0.5)
    print("sent", flush=True)
def save():
    time.sleep(20)
    print("saved", flush=True)
if me:
    if what == "send":
        threading.Thread(target=send).start()
    elif what == "child":
        multiprocessing.get_context("fork").Process(target=send).start()
    else:
        atexit.register(save)
"""


@pytest.mark.parametrize(
    ("what", "last"), [("send@1", "sent"), ("child@1", "sent"), ("save@1", "saved")]
)
def test_a_program_whose_main_thread_has_ended_is_not_ended_while_it_works(tmp_path, what, last):
    script(tmp_path, WORKS_ON)
    done = call(tmp_path, "cluster.hang_timeout_s=5", program=("train.py", what), code=0)
    assert last in log(tmp_path, 1)
    said = " ".join((done.stdout + done.stderr).split())
    assert "has not joined the others" not in said, "it waits for no rank any more"
    assert "ended as finished: its work" not in log(tmp_path, 1)


SLOW_DISK = """
import os, time, torch, torch.distributed as dist
from orchestrator import Accumulator, Loss, current_run
fsync, waited = os.fsync, []
def slow(descriptor):
    if "checkpoints" in os.readlink(f"/proc/self/fd/{descriptor}") and not waited:
        waited.append(descriptor)
        time.sleep(12)
    return fsync(descriptor)
os.fsync = slow
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1))
for window in current_run.windows(32, global_batch=8, steps=1, checkpoint_every=2, epochs=1):
    for piece in window:
        count = len(piece)
        accumulator.backward(Loss(model(torch.ones(count, 2)).sum(), weight=count))
    accumulator.boundary()
"""


def test_a_loop_over_windows_that_waits_for_its_disk_is_not_ended(tmp_path):
    script(tmp_path, SLOW_DISK)
    limits = ("cluster.ranks_per_node=1", "cluster.hang_timeout_s=6", "run.max_restarts=0")
    done = call(tmp_path, *limits, code=0)
    said = " ".join((done.stdout + done.stderr).split())
    assert "it saves the checkpoint after update 2" in said


def test_programs_in_other_languages_and_modules_run_as_well(tmp_path):
    script(tmp_path, '#!/bin/sh\necho "shell $RANK of $WORLD_SIZE: $*"\n', "train.sh", run=True)
    call(tmp_path, "job.arguments.lr=0.1", program=("./train.sh", "a b"), code=0)
    assert "shell 2 of 4: a b --lr=0.1" in log(tmp_path, 2)
    package = tmp_path / "package"
    package.mkdir()
    script(package, "from package import helper\n", "module.py")
    script(package, "import sys; print('module', sys.argv[1:], sys.stdin.read())\n", "helper.py")
    helpers.call(
        "job=program",
        "job.command=[-m,package.module]",
        "job.argument_style=bare",
        "job.arguments.lr=0.1",
        f"run.dir={tmp_path / 'second'}",
        cwd=tmp_path,
        code=0,
    )
    assert "module ['lr=0.1']" in (tmp_path / "second/logs/rank-00000.log").read_text()


SWEPT = f"""{QUICK}
from orchestrator import current_run as run
print("given", sys.argv[1:])
if "--lr=0.1" in sys.argv:
    run.report(0, loss=0.125, samples=64)
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Two points of a script, of which the second reports nothing: their folder, and the table."""
    tmp_path = tmp_path_factory.mktemp("swept")
    script(tmp_path, SWEPT)
    done = helpers.call(
        "-m",
        "cluster.nodes=1",
        "cluster.ranks_per_node=1",
        "job.arguments.lr=0.1,0.01",
        "job.arguments.out=${run.dir}/weights",
        "hydra.sweep.dir=sweep",
        "--",
        "train.py",
        "--log",
        "{run.dir}/log",
        "it's ${HOME}, [a]",
        cwd=tmp_path,
        code=0,
    )
    return tmp_path / "sweep", done.stdout


def test_arguments_of_a_script_are_swept_and_end_in_the_table(swept):
    sweep, printed = swept
    heads = re.search(r"^.*\blr\b.*state.*$", printed, flags=re.MULTILINE)[0].split()
    expected = ["state", "time", "per", "update", "final", "loss"]
    assert heads[2:] == expected, "a column without values is left out"
    time, other = r"[\d.]+ m?s", r"\S+ m?s|-"
    assert re.search(rf" 0\.1 +finished +({time}) +({other}) +0\.1250\s*$", printed, re.MULTILINE)
    assert re.search(rf" 0\.01 +finished +({time}) +- +-\s*$", printed, re.MULTILINE)
    assert "Weights" not in printed, "a program has no weights that we know"
    for number, rate in enumerate(("0.1", "0.01")):
        text = (sweep / f"{number}/logs/rank-00000.log").read_text()
        run = sweep / str(number)
        words = ["--log", f"{run}/log", "it's ${HOME}, [a]", f"--lr={rate}", f"--out={run}/weights"]
        assert f"given {words}" in text


def test_every_verb_has_a_word_for_programs_that_report_and_for_those_that_do_not(swept):
    sweep, _ = swept
    reporting, silent = sweep / "0", sweep / "1"
    assert re.search(
        r"updates +1\b.*loss +0\.1250", helpers.verb("status", reporting).stdout, re.DOTALL
    )
    assert re.search(r"train\.py .*\n.*updates +\u2013", helpers.verb("status", silent).stdout)
    assert re.search(r"last loss +0\.1250", helpers.verb("attach", reporting).stdout)
    assert "given" in helpers.verb("logs", silent).stdout
    refused = helpers.verb("compare", reporting, silent, code=2)
    assert "is a program's, which saves its weights its own way" in refused.stderr
    anew = helpers.verb("resume", silent, "job.arguments.lr=1")
    assert (anew.returncode, "Traceback" in anew.stderr) == (2, False)
    assert "is a new run" in anew.stderr, anew.stderr


def test_a_stop_reaches_only_the_loop_until_it_has_ended_and_then_the_rest(tmp_path):
    """The shell script around the loop, and a data loader's worker, get no signal while the loop
    ends its update, the same on all ranks, and saves; afterwards they are ended.
    """
    aside = "worker = subprocess.Popen(['sleep', '600'])\n"
    text = LOOP.replace("import math", f"{aside}import math")
    script(tmp_path, f"{text}print('worker', worker.poll(), flush=True)\nworker.kill()\n")
    words = f"#!/bin/sh\n{sys.executable} {tmp_path}/train.py\necho after\nexec sleep 600\n"
    script(tmp_path, words, "train.sh", run=True)
    process = begin(tmp_path, "cluster.nodes=1", program=("./train.sh",), waits_for=2)
    done = helpers.verb("cancel", tmp_path / "run")
    assert "once all its ranks are done with the same update" in done.stdout
    output = helpers.await_exit(process, 3)
    said = [log(tmp_path, rank) for rank in range(2)]
    [last] = {re.search(r"last (\d+) .*\nworker None\n", text)[1] for text in said}
    assert re.search(rf"updates +{int(last) + 1}", output)
    assert "Terminated" not in "".join(said), "the shell says that of what a signal has ended"


SAVES = f"""{QUICK}
print("given", sys.argv[1:])
folder, *more = sys.argv[1:]
number = len(os.listdir(folder)) if os.path.isdir(folder) else 0
if number < 2:
    os.makedirs(folder, exist_ok=True)
    open(f"{{folder}}/{{9 - number}}.pt", "w").close()
    sys.exit(1)
"""


def test_a_program_gets_its_newest_file_from_the_second_attempt_on(tmp_path):
    script(tmp_path, SAVES)
    run = tmp_path / "run[1]"  # in a pattern, a bracket would mean its letters
    line = ("cluster.nodes=1", "cluster.ranks_per_node=1", f"run.dir='{run}'", "run.max_restarts=3")
    newest = "job.resume_arguments=[--load,'{newest:{run.dir}/saved/*.pt}']"
    helpers.call(*line, newest, "--", "train.py", "{run.dir}/saved", cwd=tmp_path, code=0)
    given = [
        line
        for line in (run / "logs/rank-00000.log").read_text().splitlines()
        if line.startswith("given")
    ]
    saved = f"{run}/saved"
    loads = [[], ["--load", f"{saved}/9.pt"], ["--load", f"{saved}/8.pt"]]
    assert given == [f"given {[saved, *words]}" for words in loads]
    assert with_newest_files(["--load", f"{{newest:{tmp_path}/nowhere/*}}"]) == []
    wrong = helpers.call(
        *line, "job.resume_arguments=--load", "--", "train.py", cwd=tmp_path, code=2
    )
    assert "job.resume_arguments must be a list of words" in wrong.stderr


def test_too_few_devices_are_warned_of(tmp_path):
    script(tmp_path, QUICK)
    asked = ("cluster.gpus_per_node=1", "cluster.ranks_per_node=1")
    done = call(tmp_path, *asked, code=0, CUDA_VISIBLE_DEVICES="0")  # for two nodes
    assert "ranks 0-1: it has 0 of the 1 devices" in done.stdout
    status = json.loads(helpers.verb("status", tmp_path / "run", "--json").stdout)[0]
    assert "cluster.gpus_per_node=1" in str(status["warnings"])
