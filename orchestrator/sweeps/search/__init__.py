"""Our own search: trials are chosen by what came of earlier ones, each as soon as one has ended."""
