"""Arguments after `--` reach the program unchanged; a program that cannot run is refused."""

import random
import signal
import sys

import pytest
import yaml

from orchestrator import launch
from orchestrator.config.command_line import program_overrides, read_command_line
from orchestrator.config.composer import Composer
from orchestrator.config.program import ProgramConfig, program_of
from orchestrator.config.reading import read_config, to_yaml
from orchestrator.plan.program import notes_of_program, plan_of_program
from tests.programs import script

AWKWARD = "'\"\\${},[]=() ~a:#&*!|>%@`\n\t-0\u00e4\u4e2d\u00a0\u2028"


def words_of(seed, count):
    """Words of letters that Hydra, OmegaConf, YAML or a shell have a meaning for."""
    draw = random.Random(seed)
    return ["".join(draw.choices(AWKWARD, k=draw.randint(0, 8))) for _ in range(count)]


@pytest.mark.parametrize("sweep", [False, True])
def test_words_come_through_composition_and_the_run_folder_as_they_were_typed(sweep):
    words = words_of(seed=sweep, count=300)
    rate = "0.1,0.2" if sweep else "0.2"
    flags = ["-m"] if sweep else []
    line = read_command_line([*flags, f"job.arguments.lr={rate}", "--", "train.py", *words])
    composer = Composer(line)
    found = composer.compose()
    values = (composer.point(1, composer.combinations()[1]) if sweep else found).values
    assert values["job"]["command"] == ["train.py", *words]
    readable = [word for word in words if word.isprintable()]
    values["job"]["command"][1:] = readable
    again = read_config(yaml.safe_load(to_yaml(read_config(values))))
    assert program_of(again.job).argv == (*readable, "--lr=0.2")


REFUSED = {
    ("train.py", "--k", "a b"): (
        "a program comes after --, and its arguments after it: python -m orchestrator run -- "
        "train.py --k 'a b'"
    ),
    ("cluster.nodes=2", "./train.sh"): "orchestrator run cluster.nodes=2 -- ./train.sh",
    ("bash", "train.sh"): "orchestrator run -- bash train.sh",
    ("-cn", "main", "train.sh", "-v"): "orchestrator run -cn main -- train.sh -v",
    ("--",): "after -- comes the program",
    ("--", "tran.py"): "did you mean train.py?",
    ("--", "nowhere/train.py"): "there is no folder nowhere",
    ("--", "folder"): "folder is a folder; to run a package of Python: -m folder",
    ("--", "noshebang.sh"): "its first line must be as in #!/bin/bash",
    ("--", "./norunbit.sh"): "chmod +x ./norunbit.sh",
    ("--", "broken.py"): "broken.py is no Python: line 2: ",
    ("--", "link.py"): "there is no program link.py",
    ("--", "/dev/null"): "/dev/null is no file that could be run by you",
    ("--", "-m"): "write -m package.module",
    ("--", "-m", "nothing.at.all"): "there is no module 'nothing.at.all'",
    ("--", "-m", "tests"): "has no __main__",
    ("--", "--lr", "train.py"): "must begin with a program",
    ("--", sys.executable, "-c", "print()"): "python's own options are not passed on",
    ("--", "cluster.nodes=2", "train.py"): "KEY=VALUE of ours comes before --",
    ("--", "torchrun", "train.py"): "torchrun starts ranks itself",
    ("--", "accelerate", "launch", "train.py"): "accelerate starts ranks itself",
    ("job=digits", "--", "train.py"): "job=digits says what to run, and so does --",
    ("job=program",): "as in job.command=[train.py]",
    ("job=program", "job.command=train.py"): "must be a list",
    ("job.lr=0.1", "--", "train.py"): "belongs to job.arguments.lr",
    ("job.style=tensorflow", "--", "train.py"): "job.style must be one of torch",
    ("job.arguments.layers=[1,2]", "--", "train.py"): "try job.argument_style=words",
    ("train.epochs=2", "--", "train.py"): "train.epochs=2.0 means nothing to a program",
    ("optimizer=sgd", "--", "train.py"): "optimizer means nothing to a program",
    ("transport=gloo", "--", "train.py"): "transport=gloo means nothing to a program",
    ("accumulation.global_batch=64", "--", "train.py"): "global_batch=64 means nothing",
}


@pytest.mark.parametrize("line", REFUSED, ids=" ".join)
def test_unusable_request_does_nothing(line, tmp_path, monkeypatch, capsys):
    script(tmp_path, "")
    script(tmp_path, "echo\n", "noshebang.sh", run=True)
    script(tmp_path, "#!/bin/sh\n", "norunbit.sh")
    script(tmp_path, "#!/bin/sh\n", "train.sh", run=True)
    script(tmp_path, "x = 1\ndef f(:\n", "broken.py")
    (tmp_path / "link.py").symlink_to("gone.py")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGINT)
    code = launch.main(line)
    signal.signal(signal.SIGINT, handler)  # pytest's own, which the command has replaced
    assert code == 2
    message = " ".join(capsys.readouterr().err.split())
    assert REFUSED[line] in message
    assert sorted(tmp_path.iterdir()) == before


def test_this_pythons_name_before_a_script_changes_nothing():
    plain = program_overrides(["train.py", "x"])
    assert program_overrides([sys.executable, "-u", "train.py", "x"]) == plain


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("python src/train.py --lr 1", "train"),
        ("python3.12 -u x.py", "x"),
        ("python -m pkg.mod", "mod"),
        ("python -W ignore -m pkg.mod -c 3", "mod"),
        ("/usr/bin/bash scripts/X.sh", "x"),
        ("bash -c ls", "bash"),
        ("bash -lc ls", "bash"),
        ("python -O x.py", "x"),
        ("python", "python"),
        ("train.py python x.sh", "train"),
        ("-m pkg.python", "python"),
    ],
)
def test_a_run_is_named_after_its_script(words, name):
    assert ProgramConfig(command=tuple(words.split())).name == name


def test_another_python_of_path_is_warned_of(tmp_path, monkeypatch):
    other = script(tmp_path, "#!/bin/sh\n", "python", run=True)
    monkeypatch.setenv("PATH", str(tmp_path))

    def warnings_of(*words):
        config = Composer(read_command_line(["--", *words])).compose()
        return plan_of_program(read_config(config.values)).warnings

    [warning] = warnings_of("python", "train.py")
    assert f"python is {other}, not the launcher's {sys.executable}" in warning
    assert not warnings_of(sys.executable, "train.py")
    assert not warnings_of("train.py")


def test_keys_after_the_dashes_belong_to_the_program():
    ours = ["cluster.nodes=3", "+cluster=slurm", "run.dir=x", "++job.arguments.lr=1"]
    others = ["lr=0.1", "--cluster.nodes=3", "model.run.dir=x", "job=a", "cluster.nodes", "x=1=2"]
    config = Composer(read_command_line(["--", "train.py", *others, *ours])).compose()
    plan = plan_of_program(read_config(config.values))
    assert plan.argv == ("train.py", *others, *ours)
    assert [said.partition(" comes after --")[0] for said in plan.warnings] == ours


@pytest.mark.parametrize("method", ["windows", "report"])
def test_the_note_on_a_plan_is_another_for_a_loop_over_windows(tmp_path, monkeypatch, method):
    monkeypatch.chdir(tmp_path)
    script(tmp_path, "import loop\n")
    script(tmp_path, f"from orchestrator import current_run as r\nr.{method}(8)\n", "loop.py")
    config = Composer(read_command_line(["--", "train.py"])).compose()
    [note] = notes_of_program(read_config(config.values))
    assert ("nothing here splits its data" in note) is (method == "report")
