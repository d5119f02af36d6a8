"""How ranks that are left find out who else is, and agree on it; see surviving.md."""
