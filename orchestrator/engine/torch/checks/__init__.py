"""What would be wrong in silence, looked for."""
