"""The house rules of orchestrator/: no long functions or files, no trains of arguments, no circles,
and a layer for each folder.
"""

import ast
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_LINES, MOST_OF_A_FILE, MOST_ARGUMENTS = 60, 300, 8


def _above(path):
    text = path.read_text(encoding="utf-8")
    name = str(path.relative_to(ROOT / "orchestrator"))
    if text.count("\n") > MOST_OF_A_FILE:
        yield f"{name}: file"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            if len(given.posonlyargs + given.args + given.kwonlyargs) > MOST_ARGUMENTS:
                yield f"{name}: parameters of {node.name}"
            if node.end_lineno - node.lineno >= MOST_LINES:
                yield f"{name}: lines of {node.name}"
        elif isinstance(node, ast.Call) and len(node.args) + len(node.keywords) > MOST_ARGUMENTS:
            yield f"{name}: call of {ast.unparse(node.func)}"


def _files():
    return sorted((ROOT / "orchestrator").rglob("*.py"))


def _found():
    return {sentence for path in _files() for sentence in _above(path)}


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


def test_nothing_is_above_a_bound():
    assert not _found()


def test_what_is_above_a_bound_is_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "orchestrator" / "a.py"
    file.parent.mkdir()
    body = "    pass\n" * MOST_OF_A_FILE
    file.write_text(f"def f(a, b, c, d, e, g, h, i, j):\n{body}f(1, 2, 3, 4, 5, 6, 7, 8, 9)\n")
    assert _found() == {
        "a.py: file",
        "a.py: parameters of f",
        "a.py: lines of f",
        "a.py: call of f",
    }


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
    there = {p.stem for p in (ROOT / "orchestrator").glob("[!_]*") if p.suffix in ("", ".py")}
    assert there <= placed
