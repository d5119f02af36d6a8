"""From each parameter's gradient to the one sum over ranks."""
