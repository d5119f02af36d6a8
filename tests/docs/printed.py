"""Extraction of commands, code, settings and file names from the pages of the documentation.

A shell block is not read by rules of ours: bash runs it, with stand-ins for all programs that write
down what they were called with. So quoting, arrays and continued lines mean what a reader's shell
makes of them.
"""

import os
import re
import subprocess
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]

PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "slurm" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
]
COMMENTED = [
    *sorted((ROOT / "conf").rglob("*.yaml")),
    *sorted((ROOT / "jobs").glob("*.py")),
    ROOT / "Makefile",
    ROOT / "slurm" / "__main__.py",
    ROOT / "benchmarks" / "__main__.py",
    ROOT / "benchmarks" / "chaos.py",
]
"""Files whose comments and docstrings name commands."""

SLURMS = ("srun", "sbatch", "squeue", "scontrol", "sacct")
PROGRAMS = ("python", "make", "orchestrator", "pip", *SLURMS)
_CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_FENCED = re.compile(r"^(`{3,})(\w*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:(?<=\n\n)|\A)(?: {4}.*\n+)+", re.MULTILINE)


@dataclass(frozen=True)
class Printed:
    """One thing on one page."""

    page: str
    text: str

    def __str__(self):
        return f"{self.page}: {self.text}"


def _named(path):
    return path.relative_to(ROOT).as_posix()


def _text(path):
    return path.read_text(encoding="utf-8")


def blocks(path):
    """(language, text) of each block of code of a page, fenced or indented."""
    text = _text(path)
    fenced = [(found[2], found[3]) for found in _FENCED.finditer(text)]
    rest = _FENCED.sub("", text)
    return fenced + [("", textwrap.dedent(found[0])) for found in _INDENTED.finditer(rest)]


def spans(path):
    """Return the text in backquotes on a page, in one line each; of other files, in comments."""
    text = _text(path)
    if path.suffix == ".md":
        text = _INDENTED.sub("\n", _FENCED.sub("", text))
    return [" ".join(found[2].split()) for found in _CODE.finditer(text)]


def typed(block, folder):
    """Return the commands of a shell block, each a list of words, as bash parses them."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    record = folder / "record"
    record.write_text("")
    for name in (*PROGRAMS, "kill"):
        stub = programs / name
        stub.write_text(f'#!/bin/sh\nprintf "%s\\0" {name} "$@" >>"$RECORD"\necho >>"$RECORD"\n')
        stub.chmod(0o700)
    subprocess.run(
        ["/bin/bash", "-euc", block],
        check=True,
        cwd=folder,
        timeout=LIMIT_S,
        env={"PATH": str(programs), "RECORD": str(record), "HOME": os.environ["HOME"]},
    )
    return [line.split("\0")[:-1] for line in record.read_text().splitlines() if line]


def shell_commands(folder):
    """(page, words) of every command in the shell blocks of all pages."""
    found = []
    for path in PAGES:
        for language, text in blocks(path):
            first = {line.split()[0] for line in text.splitlines() if line.split()}
            if language in ("bash", "sh") or (not language and not first.isdisjoint(PROGRAMS)):
                found += [(_named(path), words) for words in typed(text, folder)]
    return found


def python_blocks():
    """All blocks of Python, those of doctests without their prompts."""
    found = []
    for path in PAGES:
        for language, text in blocks(path):
            if ">>> " in text:
                lines = [x[4:] for x in text.splitlines() if x.startswith((">>> ", "... "))]
                found.append(Printed(_named(path), "\n".join(lines)))
            elif language == "python" or re.match(r"(from|import|with|class|def) ", text):
                found.append(Printed(_named(path), text))
    return found


def inline():
    """Everything in backquotes, on pages and in comments."""
    return [Printed(_named(p), span) for p in (*PAGES, *COMMENTED) for span in spans(p)]


def links():
    """(page, target) of every link that leads into the project."""
    return [
        (path, target)
        for path in PAGES
        for target in re.findall(r"\]\(([^)\s]+)\)", _FENCED.sub("", _text(path)))
        if "://" not in target
    ]
