"""The house rules of orchestrator/: no long functions or files, no trains of arguments."""

import ast
from pathlib import Path

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


def _found():
    files = sorted((ROOT / "orchestrator").rglob("*.py"))
    return {sentence for path in files for sentence in _above(path)}


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
