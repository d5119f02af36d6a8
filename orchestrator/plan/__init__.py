"""Pure arithmetic: who computes what, in which order, at which rate, for how many bytes."""
