"""What a program sees of the run that it is a part of: its folder, its record, its stops.

It runs in somebody else's process: no framework is imported, and nothing of ours beyond this room.
"""
