"""Commands of other packages: listed, completed, run and refused like those of this project."""

import pytest

from orchestrator.plugins import COMMANDS
from tests.helpers import ROOT, verb

GREET = '''
from pathlib import Path
from typing import Annotated
import typer
from orchestrator.commands.interface import command, program_of
from orchestrator.errors import UsageError

def greet(name: Annotated[str, typer.Argument(help="To greet.")], loud: bool = False) -> None:
    """Greet somebody."""
    if name == "nobody":
        raise UsageError("there is nobody to greet; name somebody")
    print(f"HELLO {name}" if loud else f"hello {name}")

@command("echo -- train.py", takes_program=True)
def echo(context: typer.Context) -> None:
    """Print a program."""
    print(program_of(context))

@command("show FILE")
def show(file: Path) -> None:
    """Print a file."""
    print(file.read_text())
'''


@pytest.fixture
def package(tmp_path):
    """Install a package whose commands are made of a source; return where it is found."""

    def install(source, *entries, name="greeter"):
        info = tmp_path / f"{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (tmp_path / f"{name}.py").write_text(source)
        lines = "\n".join((f"[{COMMANDS.group}]", *entries))
        (info / "entry_points.txt").write_text(f"{lines}\n")
        return {"PYTHONPATH": f"{tmp_path}:{ROOT}"}

    return install


def test_a_command_of_a_package_has_an_example_and_takes_a_program(package):
    where = package(GREET, "echo = greeter:echo")
    example = "As in: python -m orchestrator echo -- train.py"
    assert example in verb("echo", "--help", code=0, **where).stdout
    printed = verb("echo", "--", "train.py", "--version", "--help", code=0, **where).stdout
    assert printed == "['--', 'train.py', '--version', '--help']\n"


def test_a_command_of_a_package_shows_a_traceback_if_asked(package):
    where = package(GREET, "show = greeter:show")
    message = "error: nowhere: No such file or directory\n"
    assert verb("show", "nowhere", code=2, **where).stderr == message
    shown = verb("show", "-v", "nowhere", code=2, **where).stderr
    assert shown.startswith("Traceback")
    assert shown.endswith(message)


def test_a_command_of_a_package_is_listed_with_ours_and_runs(package):
    where = package(GREET, "greet = greeter:greet", "plan = greeter:greet")
    listed = verb("--help", code=0, **where).stdout
    assert "Greet somebody." in listed
    assert listed.count("Greet somebody.") == 1, "plan is ours"
    assert verb("greet", "ann", "--loud", code=0, **where).stdout == "HELLO ann\n"
    assert "To greet." in verb("greet", "--help", code=0, **where).stdout
    refused = verb("greet", "nobody", code=2, **where)
    assert refused.stderr == "error: there is nobody to greet; name somebody\n"
    assert "'greet'" in verb("gret", code=2, **where).stderr, "the nearest name"


def test_unimportable_command_is_refused(package):
    where = package("raise ValueError('broken')", "greet = greeter:greet")
    sentence = "command=greet: greeter:greet of greeter 1.2 cannot be imported: ValueError: broken"
    assert verb("greet", "ann", code=2, **where).stderr == f"error: {sentence}\n"
    listed = verb("--help", code=0, **where)
    assert f"warning: {sentence}" in listed.stderr
    assert "resume" in listed.stdout


def test_command_of_two_packages_is_refused(package):
    package(GREET, "greet = greeter:greet")
    where = package(GREET, "greet = waver:greet", name="waver")
    said = verb("greet", "ann", code=2, **where).stderr
    assert "command=greet is registered by greeter 1.2 and waver 1.2" in said
