"""The images in slurm/ pin versions that this project's extras take, and that go together."""

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.helpers import ROOT


def _image(name):
    """Return the text of an image's recipe, and its arguments by name."""
    text = (ROOT / "slurm" / f"Containerfile.{name}").read_text()
    return text, dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))


@pytest.mark.parametrize(("name", "package"), [("ascend", "mindspore"), ("cuda", "torch")])
def test_an_image_pins_a_framework_that_the_extra_keeps(name, package):
    text, arguments = _image(name)
    pin = arguments[package.upper()]
    [extras] = re.findall(r"'\.\[([\w,]+)\]'", text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        line for extra in extras.split(",") for line in project["optional-dependencies"][extra]
    ]
    wanted = [one for one in map(Requirement, lines) if one.name == package]
    assert wanted
    assert all(one.specifier.contains(pin) for one in wanted), "pip would fetch another one"


def test_the_ascend_images_mindspore_accepts_its_cann():
    """MindSpore's own list, read from its source, since only an NPU runs its check."""
    _, arguments = _image("ascend")
    assert f"mindspore=={arguments['MINDSPORE']};" in (ROOT / "constraints.txt").read_text()
    [folder] = find_spec("mindspore").submodule_search_locations
    source = (Path(folder) / "run_check" / "_check_version.py").read_text()
    checker = source.partition("class AscendEnvChecker")[2]
    accepted = re.search(r"self\.version = \[([^]]*)\]", checker).group(1)
    major_minor = re.match(r"\d+\.\d+", arguments["CANN"]).group()
    assert f'"{major_minor}"' in accepted
