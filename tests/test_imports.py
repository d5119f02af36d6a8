"""Import structure of orchestrator/: no cycles between siblings, and a layer for each package."""

import ast
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _files():
    return sorted((ROOT / "orchestrator").rglob("*.py"))


def _imports(path):
    """What a file imports of ours, in the form a.b.c, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:  # a module of a package, or a name of a module
                whole = f"{node.module}.{alias.name}"
                there = (ROOT / whole.replace(".", "/")).with_suffix(".py").exists()
                yield whole if there else node.module


def _siblings():
    """For each folder, which of what lies in it imports which: {folder: {name: names}}."""
    graphs = {}
    for path in _files():
        mine = path.relative_to(ROOT).with_suffix("").parts
        for other in (name.split(".") for name in _imports(path)):
            equal = [a == b for a, b in zip(mine, other, strict=False)]
            same = [*equal, False].index(False)
            if 0 < same < len(other) and mine[same] != "__init__":
                graph = graphs.setdefault(".".join(mine[:same]), {})
                graph.setdefault(mine[same], set()).add(other[same])
    return graphs


def test_no_two_things_in_one_folder_know_each_other():
    graphs = _siblings()
    assert {"orchestrator", "orchestrator.engine.torch"} <= graphs.keys()
    for graph in graphs.values():
        TopologicalSorter(graph).prepare()  # raises CycleError


def test_a_circle_is_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    for name, other in (("a/one", "b.two"), ("b/two", "a.three"), ("a/three", "a.one")):
        file = tmp_path / "orchestrator" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"def f():\n    import orchestrator.{other}\n")
    with pytest.raises(CycleError, match=r"a.*b"):
        TopologicalSorter(_siblings()["orchestrator"]).prepare()


def test_each_folder_has_its_layer():
    """A new one that nobody placed could be imported by all, and import all."""
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [first] = [one for one in layers["contracts"] if one["name"] == "Imports point one way"]
    placed = {
        name.split(".")[1] for layer in first["layers"] for name in layer.split() if "." in name
    }
    files = (ROOT / "orchestrator").glob("[!_]*.py"), (ROOT / "orchestrator").glob("*/__init__.py")
    folders = {p.parent for p in files[1] if not p.parent.is_symlink()}
    there = {p.stem for p in files[0]} | {folder.name for folder in folders}
    assert there <= placed
