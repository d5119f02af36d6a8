"""The API of a training program: the run that it is a part of, windows of work, callbacks.

`run.py` imports no framework, since it runs in every program; `windows.py` needs torch.
"""
