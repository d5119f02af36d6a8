"""The lines of training in rank 0's log: enough to see it go on, never enough to fill a disk."""

import pytest

from orchestrator.trainer.recorder import UpdateLines


@pytest.mark.parametrize(
    ("update_s", "hours", "at_most"), [(0.05, 1, 800), (1.0, 24, 2600), (600.0, 24, 144)]
)
def test_lines_are_few_for_updates_of_any_length(capsys, update_s, hours, at_most):
    now = [0.0]
    total = int(hours * 3600 / update_s)
    lines = UpdateLines(total, clock=lambda: now[0])
    longest = last = 0.0
    for update in range(total):
        now[0] += update_s
        lines.update(update, loss=0.5, learning_rate=0.1, samples=10)
        if capsys.readouterr().out:
            longest, last = max(longest, now[0] - last), now[0]
            at_most -= 1
    assert at_most >= 0
    assert longest <= 60.0 + update_s
    assert last == now[0]


def test_a_line_has_the_loss_the_rate_and_the_speed_since_the_line_before(capsys):
    now = [0.0]
    lines = UpdateLines(10, clock=lambda: now[0])
    for update in range(3):
        now[0] += 0.6
        lines.update(update, loss=0.25, learning_rate=1e-3, samples=30)
    assert capsys.readouterr().out.splitlines() == [
        "update 1/10  loss 0.2500  learning rate 0.001  50.0 samples/s",
        "update 3/10  loss 0.2500  learning rate 0.001  50.0 samples/s",
    ]


def test_evaluations_are_thinned_like_updates_and_the_last_is_told(capsys):
    now = [0.0]
    lines = UpdateLines(100, clock=lambda: now[0])
    for update in range(100):
        now[0] += 0.1
        lines.evaluation(update, {"accuracy": 0.5})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 12
    assert lines[-1] == "held-out after update 100: accuracy 0.5000"


def test_a_full_disk_is_no_reason_to_stop(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("builtins.print", full)
    UpdateLines(10).update(0, loss=0.25, learning_rate=1e-3, samples=30)
