"""How ranks talk: groups, transports, differentiable collectives."""
