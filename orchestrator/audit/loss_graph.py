"""The weight of each sample or token in a loss, read from its autograd graph.

From the root of `backward`, a loss is followed through constant factors down to its first
reduction (a mean, a sum, or a loss function that reduces). The gradient that arrives there, divided
by the number of elements where it is a mean, is the derivative of the loss with respect to one
element: the element's weight, whatever the script divided or multiplied by.

Names and saved tensors of graph nodes are those of torch's derivatives.yaml.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

DDP_OUTPUTS = "_DDPSinkBackward"
SEVERAL = "several loss terms"
LINEAR = frozenset(
    {
        "MulBackward0",
        "MulBackward1",
        "DivBackward0",
        "DivBackward1",
        "NegBackward0",
        "AddBackward0",
        "AddBackward1",
        "SubBackward0",
        "SubBackward1",
        "RsubBackward1",
        "ToCopyBackward0",
        "CloneBackward0",
        "AliasBackward0",
        "ViewBackward0",
        "ReshapeAliasBackward0",
        "UnsafeViewBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "UnsqueezeBackward0",
        "SelectBackward0",
        "ExpandBackward0",
        DDP_OUTPUTS,
    }
)
"""Nodes that pass a gradient on, times a constant, if one input alone needs a gradient."""
DIVISIONS = frozenset({"DivBackward0", "DivBackward1"})
MEANS = frozenset({"MeanBackward0", "MeanBackward1"})
SUMS = frozenset({"SumBackward0", "SumBackward1"})
NLL = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
FUSED = frozenset(
    {
        "MseLossBackward0",
        "SmoothL1LossBackward0",
        "HuberLossBackward0",
        "SoftMarginLossBackward0",
        "BinaryCrossEntropyBackward0",
        "BinaryCrossEntropyWithLogitsBackward0",
    }
)
ADDITIONS = frozenset({"AddBackward0", "SubBackward0"})
MOST_TERMS = 64
NONE, MEAN = 0, 1  # torch's numbers of reductions
STACKS = frozenset({"StackBackward0", "CatBackward0"})


@dataclass
class Reduction:
    """One reduction of a loss.

    Attributes:
        name: of its node in the graph.
        is_mean: it divides by `elements` (or by `units`, for a loss that ignores targets).
        elements: the number of elements that it reduces.
        units: the sum of their weights, masked ones being 0.
        gradient: the one that arrived, of the loss with respect to the reduction's result.
    """

    name: str
    is_mean: bool
    elements: float
    units: float
    gradient: float | None = None


@dataclass(eq=False)
class Divisor:
    """A constant that the script divided one or several loss terms by."""

    value: float


@dataclass
class LossGraph:
    """The loss of one backward pass: its first term, and the others that are added to it.

    Attributes:
        factors: constants that the script multiplied by, from the root on; no divisors.
        divisors: constants that the script divided by; terms share those of their sum.
        others: the other terms, of which none has others.
        reductions: from the root on. One over a single element is followed by those below it.
        reason: why the loss cannot be judged.
        node: that of the last reduction.
    """

    reductions: list[Reduction]
    reason: str | None = None
    node: Any = None
    factors: list[float] = field(default_factory=list)
    divisors: list[Divisor] = field(default_factory=list)
    others: list[LossGraph] = field(default_factory=list)

    @property
    def nodes(self) -> list[Any]:
        """The node of the last reduction of each term."""
        return [self.node, *(term.node for term in self.others)]

    def to_json(self) -> dict[str, Any]:
        """Return the known facts, with the divisors of averages: those by as many as the terms that
        they divide.
        """
        counts = Counter(id(d) for term in (self, *self.others) for d in term.divisors)
        return self._to_json(counts)

    def _to_json(self, counts: Counter[int]) -> dict[str, Any]:
        averages = [d.value for d in self.divisors if counts[id(d)] == d.value != 1]
        return {
            "reductions": [asdict(r) for r in self.reductions],
            "reason": self.reason,
            "factors": self.factors,
            "divisors": [d.value for d in self.divisors],
            "averages": averages,
            "others": [term._to_json(counts) for term in self.others],
        }


def is_compiled(roots: Sequence[Tensor]) -> bool:
    """Return whether a part of a graph was compiled. A compiled function runs as it is: a mode
    around it would have it compiled again, or hide it.
    """
    queue: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(queue)
    while queue:
        node = queue.pop()
        if "Compiled" in node.name():
            return True
        queue += [input_node for input_node in _inputs(node) if input_node not in seen]
        seen.update(_inputs(node))
    return False


def read_loss(roots: Sequence[Tensor]) -> LossGraph:
    """Follow a loss to its first reduction, and register hooks for the gradient that arrives.

    Args:
        roots: what `backward` was called on.
    """
    if len(roots) != 1 or roots[0].numel() != 1:
        return LossGraph([], "backward began at several numbers")
    [root] = roots
    if root.grad_fn is None:
        return LossGraph([], "the loss has no graph")
    loss = LossGraph([])
    _follow(loss, (root.grad_fn, root.output_nr))
    loss.reason = loss.reason or next((t.reason for t in loss.others if t.reason), None)
    if len(loss.others) >= MOST_TERMS:
        loss.reason = f"more than {MOST_TERMS} loss terms"
    return loss


def _follow(loss: LossGraph, edge: Any) -> None:
    while edge is not None:
        edge = _descend(loss, *edge)


def _descend(loss: LossGraph, node: Any, output: int) -> Any:
    """Add one node to the known part of a loss; return the edge to follow, None at the end."""
    reduction = _reduction(node)
    if reduction is not None:
        return _reduce(loss, node, reduction)
    if node.name() not in LINEAR:
        if not loss.reductions:
            function = node.name().removesuffix("Backward0")
            loss.reason = f"the loss is a function ({function}) of what was reduced before"
            if "Compiled" in function:
                loss.reason = "the loss is computed in a compiled graph"
        return None
    if node.name() == DDP_OUTPUTS:  # of all outputs of a model, each with an edge
        return node.next_functions[output]
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    if len(edges) == 1:
        if node.name() in ("MulBackward0", "MulBackward1"):
            right = node.name() == "MulBackward1" or node.next_functions[1][0] is None
            factor: Any = node._saved_other if right else node._saved_self
            if isinstance(factor, Tensor) and factor.numel() > 1:
                loss.reason = "the loss is one of several numbers"
                return None
            loss.factors.append(float(factor))
        elif node.name() in DIVISIONS:
            other = node._saved_other
            loss.divisors.append(Divisor(float(other) if other.numel() == 1 else math.nan))
        return edges[0]
    main = _smoothed_cross_entropy(node)
    if main is None:
        if node.name() in ADDITIONS and len(loss.others) < MOST_TERMS:
            return _branch(loss, edges)
        function = node.name().removesuffix("Backward0")
        loss.reason = (
            f"a loss term is a function ({function}) of several values that were computed from the "
            "micro-batch, as a dice loss is"
        )
    else:
        _reduce(loss, node, main[1])
        loss.node = main[0]
    return None


def _branch(loss: LossGraph, edges: Sequence[Any]) -> Any:
    """Follow all terms of a sum but the first, whose edge is returned."""
    for edge in edges[1:]:
        term = LossGraph([*loss.reductions], factors=[*loss.factors], divisors=[*loss.divisors])
        _follow(term, edge)
        loss.others += [term, *term.others]
        term.others = []
    return edges[0]


def _reduce(loss: LossGraph, node: Any, reduction: Reduction) -> Any:
    """Add a reduction; return the edge below it where it reduces a single element."""

    def arrived(gradients: tuple[Tensor, ...]) -> None:
        reduction.gradient = float(gradients[0].detach().double().sum())

    node.register_prehook(arrived)
    loss.reductions.append(reduction)
    below = node.next_functions[0]
    if below[0] is not None and below[0].name() in STACKS and len(below[0].next_functions) > 1:
        loss.reason = SEVERAL
        return None
    loss.node = node
    return below if reduction.elements == 1 and reduction.name in MEANS | SUMS else None


def _reduction(node: Any) -> Reduction | None:
    name = node.name()
    if name in MEANS or name in SUMS:
        elements = math.prod(node._saved_self_sym_sizes)
        below = node.next_functions[0][0]
        units = float(elements) if name in MEANS else _units(below, float(elements))
        return Reduction(name, name in MEANS, float(elements), units)
    if name in NLL and node._saved_reduction != NONE:
        weight = float(node._saved_total_weight)
        return Reduction(name, node._saved_reduction == MEAN, weight, weight)
    if name in FUSED and node._saved_reduction != NONE:
        elements = float(node._saved_self.numel())
        return Reduction(name, node._saved_reduction == MEAN, elements, elements)
    return None


def _units(node: Any, elements: float) -> float:
    """Return how many of the elements count: those that no mask removes, with their weights."""
    while node is not None:
        counted = _counted(node, elements)
        if counted is not None:
            return counted
        node = _input(node) if node.name() in LINEAR else None
    return elements


def _inputs(node: Any) -> list[Any]:
    """Return the nodes that compute the inputs of `node`."""
    return [edge[0] for edge in node.next_functions if edge[0] is not None]


def _input(node: Any) -> Any:
    """Return the only input; None if there are none or several."""
    inputs = _inputs(node)
    return inputs[0] if len(inputs) == 1 else None


def _counted(node: Any, elements: float) -> float | None:
    """Return how many elements count, if `node` says so."""
    name, shape = node.name(), tuple(node._input_metadata[0].shape)
    left, right = (
        node.next_functions[i][0] if len(node.next_functions) > i else None for i in (0, 1)
    )
    if name == "MulBackward0" and (left is None or right is None):
        other = node._saved_other if right is None else node._saved_self
        if isinstance(other, Tensor) and other.numel() > 1:
            weights = other.detach().expand(shape).double()
            return float(weights.sum()) if bool((weights >= 0).all()) else elements
    elif name == "MaskedFillBackward0":
        return elements - float(node._saved_mask.expand(shape).sum())
    elif name == "WhereBackward0":
        chosen = float(node._saved_condition.expand(shape).sum())
        return chosen if left is not None else elements - chosen
    elif name in NLL and node._saved_reduction == NONE:
        ignored = node._saved_ignore_index
        ignored -= 2**64 if ignored >= 2**63 else 0  # torch gives it without its sign
        return float((node._saved_target != ignored).sum())
    return None


def _smoothed_cross_entropy(node: Any) -> tuple[Any, Reduction] | None:
    """Return the cross entropy, if `node` adds the two terms of label smoothing."""
    if node.name() != "AddBackward0":
        return None
    main, smooth = (_below(edge[0]) for edge in node.next_functions)
    if main is None or smooth is None or main.name() not in NLL:
        return None
    reduction = _reduction(main)
    if reduction is None or smooth.name() not in MEANS | SUMS:
        return None
    scores = main.next_functions[0][0]
    for _ in range(6):  # the mean's input may be reshaped on the way to the scores
        if smooth is not None and smooth is not scores:
            smooth = _input(smooth)
    return (main, reduction) if smooth is scores else None


def _below(node: Any) -> Any:
    """Return the first node below that is not linear."""
    while node is not None and node.name() in LINEAR:
        node = _input(node)
    return node
