"""Random splits of an update over ranks and micro-steps, empty ranks included."""

from itertools import pairwise

from hypothesis import strategies as st


@st.composite
def cuts(draw, samples, most_ranks=6):
    """For each rank, the (first, last) of its micro-batches: contiguous, uneven, perhaps none."""
    ranks = draw(st.integers(1, most_ranks))
    edges = sorted(draw(st.lists(st.integers(0, samples), min_size=ranks - 1, max_size=ranks - 1)))
    table = []
    for first, last in zip([0, *edges], [*edges, samples], strict=True):
        inner = draw(st.lists(st.integers(first, last), max_size=3, unique=True))
        places = sorted({first, last, *inner})
        table.append(list(pairwise(places)))
    return table
