#!/bin/bash
# sbatch scripts/slurm/one_node.sh --config configs/sd35_medium/flow_opd.yaml
# One node, a process per GPU. Arguments are those of train.py; change resources on sbatch's command line, as in
# `sbatch --gpus-per-node=4 --time=8:00:00 ...`. Run it in the root of the checkout, where .venv is used if it exists.
# A run that is preempted, requeued or out of time continues from its last checkpoint (train.checkpoint_every).
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

trap 'scontrol requeue "$SLURM_JOB_ID"' USR1 # two minutes before the time is over
srun --kill-on-bad-exit=1 accelerate launch --config_file "$config" \
    --num_processes "$gpus" --main_process_port $((20000 + SLURM_JOB_ID % 10000)) \
    --num_cpu_threads_per_process $((${SLURM_CPUS_PER_TASK:-$gpus} / gpus)) \
    train.py --resume "$@" &
status=0
wait $! || status=$?
if kill -0 $! 2>/dev/null; then # it was the signal that ended the wait
    status=0
    wait $! || status=$?
fi
exit $status
