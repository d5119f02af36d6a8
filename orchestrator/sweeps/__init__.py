"""The points of a sweep, and what they are compared by."""
