"""The torch engine: groups, differentiable collectives, the accumulator."""
