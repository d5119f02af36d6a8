"""Pure arithmetic: who computes what, in which order, at which learning rate, for how many bytes."""
