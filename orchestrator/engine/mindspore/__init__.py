"""The MindSpore engine: groups without `msrun`, differentiable collectives, the accumulator.

Importing this package imports no MindSpore, so that `rendezvous.ahead` can start what takes time
before.
"""
