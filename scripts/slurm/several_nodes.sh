#!/bin/bash
# sbatch --nodes=4 scripts/slurm/several_nodes.sh --config configs/sd35_medium/flow_opd.yaml
# Several nodes, one launcher on each, a process per GPU. `output` must lie on a disk that all nodes share. Arguments,
# environment and restarts are as in one_node.sh. Not yet run under a real Slurm.
#SBATCH --job-name=flowalign
#SBATCH --nodes=2
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
config=${FLOWALIGN_ACCELERATE:-configs/accelerate/multi_node_ddp.yaml}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
launch=(
    python scripts/slurm/launch.py --config_file "$config"
    --num_machines "$SLURM_NNODES" --num_processes $((SLURM_NNODES * gpus))
    --main_process_ip "${hosts%%$'\n'*}" --main_process_port $((20000 + SLURM_JOB_ID % 10000))
    --num_cpu_threads_per_process $((${SLURM_CPUS_PER_TASK:-$gpus} / gpus))
)

asked=no again=yes
trap 'asked=yes again=yes; kill -USR1 $step' USR1 # before the time is over; srun passes it on
# shellcheck disable=SC2016 # each node has its own SLURM_NODEID
srun --kill-on-bad-exit=1 bash -c '
    count=$1 && shift
    exec "${@:1:count}" --machine_rank "$SLURM_NODEID" train.py --resume "${@:count+1}"
' launch ${#launch[@]} "${launch[@]}" "$@" &
step=$!
while [[ $again == yes ]]; do # a signal ends the wait, too
    again=no status=0
    wait $step || status=$?
done
if [[ $status == 75 || ($asked == yes && $status != 0) ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
