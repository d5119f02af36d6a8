"""An add-on: ranks compute some of each other's leaves again, and compare the bits.

It enters as the callback that `accumulation.sentinel_every` names. Nothing else imports this
folder; without it all runs without that key work.
"""
