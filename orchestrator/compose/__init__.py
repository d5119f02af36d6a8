"""From a command line to a checked `Config`: Hydra, fenced in."""
