"""A job's model and loss in the form that MindSpore compiles."""
