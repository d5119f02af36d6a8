# A site with environment modules and conda. Copy it, and put your site's names in.
#
# A preamble runs once, in the batch script, on the job's first node. What it exports reaches every
# task through srun; what it only sets (shell functions, aliases) does not.

# Some sites load modules at login only; the batch shell is none.
[ -r /etc/profile.d/modules.sh ] && . /etc/profile.d/modules.sh
[ -r /etc/profile.d/lmod.sh ] && . /etc/profile.d/lmod.sh

module purge                    # nothing of the submitting shell's choice
module load cuda/12.4           # `module avail cuda` says what there is

# `conda activate` is a function of interactive shells: its definition is loaded here.
. "$HOME/miniconda3/etc/profile.d/conda.sh"
conda activate training         # an environment on a file system that all nodes see

# The network between nodes, where NCCL does not find it by itself (`ip -br address` on a node).
# export NCCL_SOCKET_IFNAME=ib0
