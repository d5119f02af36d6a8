"""What docstrings and comments name is there: files, and modules by their dotted names."""

import dataclasses
import re

from orchestrator.config.schema import Config
from tests.docs.scripts import ROOT

CODE = sorted((ROOT / "orchestrator").rglob("*.py"))
FILES = {str(path.relative_to(ROOT)) for path in [*CODE, *(ROOT / "jobs").rglob("*.py")]}
MODULES = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in FILES}
ROOMS = {name.split(".")[1] for name in MODULES if name.count(".") > 1}
FOLDERS = {name.rpartition(".")[0] for name in MODULES}
KEYS = {
    f"{section.name}.{field.name}"
    for section in dataclasses.fields(Config())
    if dataclasses.is_dataclass(values := getattr(Config(), section.name))
    for field in dataclasses.fields(values)
}
A_FILE = re.compile(r"`(?!torch/)((?:\w+/)*\w+\.py)\b")
A_MODULE = re.compile(rf"`(?:orchestrator\.)?((?:{'|'.join(sorted(ROOMS))})(?:\.[a-z_0-9]+)+)")


def _missing(text):
    for name in A_FILE.findall(text):
        if not any(file == name or file.endswith(f"/{name}") for file in FILES):
            yield name
    for name in A_MODULE.findall(text):
        if name == "config.yaml" or name in KEYS:
            continue
        module = f"orchestrator.{name}"
        above = module.rpartition(".")[0]
        # what is no module is a name in one
        if module not in MODULES and (above not in MODULES or above in FOLDERS):
            yield name


def test_files_and_modules_that_the_code_speaks_of_exist():
    missing = {
        str(path.relative_to(ROOT)): found
        for path in CODE
        if (found := sorted(set(_missing(path.read_text(encoding="utf-8")))))
    }
    assert not missing


def test_a_name_that_is_gone_is_missed():
    assert list(_missing("see `plan/gone.py`, `plan.gone` and `plan.plan.Plan`")) == [
        "plan/gone.py", "plan.gone",
    ]  # fmt: skip
