"""Each node looked at before anything is computed on it, in the way that all ranks can compare.

`look.py` measures, collectively; `links.py` moves bytes from node to node; `judging.py` says which
node is bad, of values alone. Who calls it gives the collective: a rank its engine's, `doctor --run`
the framework's own.
"""
