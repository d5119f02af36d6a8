"""What the submitit plug-in does with several runs of one array."""

from orchestrator import submitit_plugin
from orchestrator.errors import ClusterError


def test_a_run_that_cannot_be_cancelled_leaves_no_other_one_queued(tmp_path, monkeypatch, capsys):
    codes, cancelled = iter((0, 0, 2)), []

    def cancel(run, *, now):
        cancelled.append((run.path.name, now))
        if run.path.name == "a":
            raise ClusterError("the scheduler does not answer")

    monkeypatch.setattr("orchestrator.launch.main", lambda _: next(codes))
    monkeypatch.setattr("orchestrator.cli.status.cancel", cancel)
    runs = [tmp_path / name for name in "abc"]
    assert submitit_plugin.queue(tmp_path, runs, ["cluster=slurm"]) == 2
    assert cancelled == [("a", True), ("b", True)]
    assert "the scheduler does not answer" in capsys.readouterr().err
