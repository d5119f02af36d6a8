"""How a window of micro-steps becomes one update, for each framework behind one interface."""
