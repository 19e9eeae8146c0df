#!/bin/bash
# sbatch scripts/slurm/one_node.sh --config configs/sd35_medium/flow_opd.yaml
# One node, a process per GPU. Arguments are those of train.py; change resources on sbatch's command line, as in
# `sbatch --gpus-per-node=4 --time=8:00:00 ...`. Run it in the root of the checkout, where .venv is used if it exists.
# Two minutes before the time is over the run saves, ends with status 75 and is requeued; then it goes on from there. An
# update or evaluation must take less than that, or say `sbatch --signal=B:USR1@600`: `flowalign doctor --gpus 8` knows the
# number. Nodes without network: `flowalign fetch` on the login node, and HF_HUB_OFFLINE=1. A run that is killed goes on
# from its last checkpoint (train.checkpoint_every).
# FLOWALIGN_ACCELERATE names another file of configs/accelerate. Not yet run under a real Slurm.
#SBATCH --job-name=flowalign
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=256G
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
PATH="$PWD/.venv/bin:$PATH"
gpus=${SLURM_GPUS_ON_NODE:?no GPU was asked for: sbatch --gpus-per-node=N}
config=${FLOWALIGN_ACCELERATE:-configs/accelerate/ddp_8gpu.yaml}

asked=no again=yes
trap 'asked=yes again=yes; kill -USR1 $step' USR1 # before the time is over; srun passes it on
srun --kill-on-bad-exit=1 python scripts/slurm/launch.py --config_file "$config" \
    --num_processes "$gpus" --main_process_port $((20000 + SLURM_JOB_ID % 10000)) \
    --num_cpu_threads_per_process $((${SLURM_CPUS_PER_TASK:-$gpus} / gpus)) \
    train.py --resume "$@" &
step=$!
while [[ $again == yes ]]; do # a signal ends the wait, too
    again=no status=0
    wait $step || status=$?
done
if [[ $status == 75 || ($asked == yes && $status != 0) ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
