"""`python -m orchestrator.audit SCRIPT ARGUMENTS`: run a script observed; see `observe`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # The current folder, which `python train.py` does not search: a file in it that is named
        # like a module of torch must not be imported in its place.
        sys.path.pop(0)
    from orchestrator.audit.observe import main

    main(sys.argv[1:])
