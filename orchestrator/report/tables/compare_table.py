"""Prints a comparison of two runs' weights: one sentence, and the tensors when asked for."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from orchestrator.report.compare import Comparison, TensorComparison
from orchestrator.report.terminal import literal, say
from orchestrator.units import plural


def print_comparison(comparison: Comparison, console: Console, *, tensors: bool = False) -> None:
    """Print what `compare` found; with `tensors`, one row for each, the farthest apart first."""
    count = plural(len(comparison.tensors), "tensor")
    if comparison.equal_bits:
        say(console, f"the same bits in all of {count}", "bold green")
    else:
        largest = f"{comparison.max_relative_difference:.3e}"
        say(console, f"largest relative difference: {largest} (max|a-b| / max|b|)", "bold")
        differing = [t for t in comparison.tensors.values() if not t.equal_bits]
        say(console, f"{len(differing)} of {count} differ in some bit")
    if tensors and comparison.tensors:
        console.print(_table(comparison, console))


def _table(comparison: Comparison, console: Console) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("tensor", overflow="fold")
    table.add_column("shape", overflow="fold")
    table.add_column("dtype", overflow="fold")
    table.add_column("relative", justify="right", no_wrap=True)
    table.add_column("absolute", justify="right", no_wrap=True)
    for name, tensor in sorted(
        comparison.tensors.items(), key=lambda item: -item[1].max_relative_difference
    ):
        relative, absolute = _figures(tensor)
        row = (name, str(list(tensor.shape)), tensor.dtype, relative, absolute)
        table.add_row(*(literal(text, console) for text in row))
    return table


def _figures(tensor: TensorComparison) -> tuple[str, str]:
    if tensor.equal_bits:
        return "same bits", "0"
    return f"{tensor.max_relative_difference:.3e}", f"{tensor.max_absolute_difference:.3e}"
