"""How a rank shows that it lives and gets somewhere, and how others on and off its node see it."""
