# A site where jobs run in an Apptainer (formerly Singularity) image.
#
# This prepares the host's side: which image, what it sees, where it may write. The tasks
# themselves start inside through `srun … apptainer exec --nv "$IMAGE" python …`
# (`--nv` shows NVIDIA GPUs to the image; for AMD it is `--rocm`; Ascend needs its devices bound).
# With pyxis instead, no preamble is needed: `srun --container-image=…` does all of this.

[ -r /etc/profile.d/modules.sh ] && . /etc/profile.d/modules.sh
command -v apptainer >/dev/null || module load apptainer

export IMAGE="$HOME/images/training.sif"        # on a file system that all nodes see
[ -r "$IMAGE" ] || { echo "preamble: cannot read image $IMAGE on $(hostname)" >&2; exit 1; }

# The image sees $HOME, /tmp and the working folder only. Name your data and the run folders' disk.
export APPTAINER_BINDPATH="/scratch,/datasets:/datasets:ro"

# The cache fills a home folder's quota within a day; keep it with the job.
export APPTAINER_CACHEDIR="${TMPDIR:-/tmp}/apptainer-$USER"
