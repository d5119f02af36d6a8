"""Hostile command lines, drawn from a seed, end with a message and run nothing."""

from itertools import product

import pytest

import orchestrator.cli.application
import orchestrator.config.composer  # noqa: F401  # so that each child finds it imported
from orchestrator.config.composer import compose
from tests.hostile.arena import run
from tests.hostile.lines import FILES, FOLDERS, Line, lines

SEED, SHARES, EACH = 20261121, 2, 30


@pytest.mark.parametrize("share", range(SHARES))
def test_no_command_line_ends_in_a_traceback_or_a_hang_or_runs_another_command(tmp_path, share):
    wrong = []
    for number, line in enumerate(lines(SEED + share, EACH, tmp_path)):
        folder = tmp_path / f"{number}.run"
        folder.mkdir()
        ended = run(line, folder)
        if faults := ended.faults(folder):
            wrong.append((line, faults, ended.words[-400:]))
    assert not wrong


def test_the_same_seed_gives_the_same_lines(tmp_path):
    def first(name):
        folder = tmp_path / name
        folder.mkdir()
        found = lines(7, 20, folder)
        return [[a.replace(str(folder), "") for a in line.arguments] for line in found]

    assert first("one") == first("two")


@pytest.mark.parametrize("name", FOLDERS)
def test_a_config_folder_of_any_name_is_read(tmp_path, name):
    configs = tmp_path / name
    (configs / "experiment").mkdir(parents=True)
    (configs / "experiment" / "fine.yaml").write_bytes(FILES["fine"])
    if "\n" in name:  # no command line of ours can hold it
        return
    assert compose(["experiment=fine"], str(configs)).train.seed == 5


def test_a_traceback_that_is_asked_for_leaves_the_sentence_and_the_exit_code(tmp_path):
    starts = (("orchestrator.launch",), ("orchestrator", "plan"))
    for number, ((module, *verb), more) in enumerate(product(starts, ([], ["-v"]))):
        folder = tmp_path / str(number)
        folder.mkdir()
        ended = run(Line(module, (*verb, "train.seed='", *more), "."), folder)
        assert ended.code == 2
        assert ("Traceback" in ended.words) == bool(more)
        assert "error: the command line cannot be read at train.seed" in ended.words
        assert not ended.faults(folder)
