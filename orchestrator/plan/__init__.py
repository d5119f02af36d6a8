"""Pure arithmetic: which rank computes what, in which order, at which rate, for how many bytes."""
