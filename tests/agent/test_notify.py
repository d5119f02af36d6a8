"""Messages that an agent, or a process after it, sends: all of them, and none twice."""

import os
import re
import subprocess
import sys

import pytest

from orchestrator.config.composer import compose
from orchestrator.config.reading import to_yaml
from orchestrator.config.schema import NotifyConfig
from orchestrator.errors import ConfigError
from orchestrator.notify import Notifier, check_recipients, messages
from orchestrator.rundir.files import write_json
from tests.helpers import environment, until

pytestmark = pytest.mark.whole_runs

NODE = {
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_NTASKS": "2",
    "SLURM_NODEID": "0",
    "SLURM_JOB_ID": "7",
    "SLURMD_NODENAME": "n1",
    "SLURM_JOB_NODELIST": "n1",
    "ORCHESTRATOR_NODE_ADDRESS": "127.0.0.1",
}


def say(fifo, word):
    """Write a word to the process that waits for it."""

    def written():
        try:
            end = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # no process reads
            return False
        with os.fdopen(end, "w") as file:
            file.write(word)
        return True

    until(written, what="a process that waits for a word")


@pytest.fixture
def run(run, tmp_path):
    """A run whose first update is done, and whose command waits for the word that it then notes."""
    os.mkfifo(tmp_path / "gate")
    script = tmp_path / "note.sh"
    script.write_text(
        f"#!/bin/sh\ncd {tmp_path}\necho >> begun\nread word < gate\n"
        'echo "$ORCHESTRATOR_EVENT $word" >> notes\n[ "$word" != fails ]\n'
    )
    script.chmod(0o700)
    act = f"[ $ORCHESTRATOR_RANK = 1 ] && exec sleep 600; read word < {tmp_path}/let-go; exit 1"
    command = (f"job.command=[sh,-c,'{act}']", "job.style=plain", "cluster.nodes=1")
    config = compose(
        ["job=program", *command, "cluster.ranks_per_node=2", f"notify.command={script}"]
    )
    run.write_config(to_yaml(config))
    run.begin_attempt()
    run.metrics.write_text('{"loss": 1.0}\n')
    return run


def test_the_end_of_an_agents_workers_does_not_end_a_message_that_it_sends(tmp_path, run):
    os.mkfifo(tmp_path / "let-go")
    node = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.agent.node", str(run.path)],
        env=environment(**NODE),
        start_new_session=True,
    )
    until((tmp_path / "begun").exists, what="the first message")
    say(tmp_path / "let-go", "go\n")  # rank 0 fails, so the agent kills rank 1
    until(run.outcome(0).exists, what="the end of the attempt")
    say(tmp_path / "gate", "is sent\n")
    assert node.wait(30) == 0
    assert (tmp_path / "notes").read_text() == "first_update is sent\n"
    notifier = Notifier(run)  # as the batch script does
    notifier.send()
    assert not notifier.senders, "it is not sent twice"


def test_a_message_that_was_not_sent_is_sent_by_the_next_process_and_then_no_more(tmp_path, run):
    for word in ("fails", "is sent"):
        notifier = Notifier(run)
        notifier.send()
        say(tmp_path / "gate", f"{word}\n")
        notifier.wait()
        notifier.send()
        assert not notifier.senders, "one process tries it once"
    Notifier(run).send()
    assert (tmp_path / "notes").read_text().splitlines() == [
        "first_update fails",
        "first_update is sent",
    ]
    assert (tmp_path / "begun").read_text() == "\n\n"


def test_a_message_whose_process_cannot_be_started_is_sent_by_the_next_process(tmp_path, run):
    run.logs.rename(tmp_path / "logs")
    Notifier(run).send()
    (tmp_path / "logs").rename(run.logs)
    notifier = Notifier(run)
    notifier.send()
    say(tmp_path / "gate", "is sent\n")
    notifier.wait()
    assert (tmp_path / "notes").read_text() == "first_update is sent\n"


@pytest.mark.parametrize("command", ["mail -s 'it's over' me", "note \\", "no-such-program", ""])
def test_a_command_that_cannot_be_run_is_refused(command):
    with pytest.raises(ConfigError, match=f"^notify.command={re.escape(command)}: "):
        check_recipients(NotifyConfig(command=command))


def test_each_stall_of_a_run_is_a_message_until_the_run_has_ended(run):
    run.metrics.unlink()
    for moment in (100.0, 200.0):
        write_json(run.stall(0), {"time": moment, "text": "rank 1 has made no progress"})
        assert list(messages(run)) == [
            (f"stall-0-{moment:.0f}", "stall", "rank 1 has made no progress"),
        ]
    write_json(run.result, {"state": "finished", "updates": 3, "culprit": None})
    assert [event for _, event, _ in messages(run)] == ["end"]
