# A Python virtual environment, on a file system that all nodes see.
#
# Not one in /tmp or on a local disk of the login node: the other nodes would find nothing there.
# A venv holds the absolute path of the Python it was made with; that too must exist on the nodes.

VENV="$HOME/venvs/training"

if [ ! -x "$VENV/bin/python" ]; then
    echo "preamble: no Python at $VENV/bin/python on $(hostname)" >&2
    exit 1                      # a clear end here, instead of an import error on every rank
fi
. "$VENV/bin/activate"

# One thread for each CPU that SLURM gave the task; else every rank takes all CPUs of the node.
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
