"""How surviving ranks find each other and agree; see surviving.md."""
