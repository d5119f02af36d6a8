"""The audit of a training script: is its update that of one big batch?

`auditing.py` starts a run whose ranks are observed (`observe.py`), and judges their records
(`judge.py`).
"""

# Variables of the environment by which a run is observed. A program gets none that begin with
# ORCHESTRATOR_, so these do not.
FOLDER = "TRAINING_AUDIT_FOLDER"  # of the records
UPDATES = "TRAINING_AUDIT_UPDATES"  # how many; empty: 8, or up to the end of the first epoch
FAKE_CUDA = "TRAINING_AUDIT_FAKE_CUDA"
FILES = "files"
"""The scratch folder's name, in the folder that holds that of the records."""
