#!/bin/bash
# Trains on all GPUs of two nodes, and goes on from the last checkpoint after a failure, a time limit or a preemption:
#   sbatch examples/clusters/slurm.sh --steps 10000
# What stands behind the script's name are flags of examples/train_gpt.py.
#SBATCH --job-name=fzero
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --open-mode=append
#SBATCH --output=fzero-%j.log
set -euo pipefail

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${hosts%%$'\n'*} # where the ranks find each other
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / ${SLURM_GPUS_ON_NODE:-8}))
export FZERO_CACHE=${FZERO_CACHE:-/tmp/fzero-$USER}  # compiled functions: on a disk of the node's own
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else PyTorch 2.13 keeps the address of the first start (docs/guides/clusters.md)

# one torchrun a node, which starts a rank a GPU
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$first:${FZERO_PORT:-29500}" \
    --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    --max-restarts 10 \
    examples/train_gpt.py --resume --timeout 120 --out "${FZERO_OUT:-$PWD/runs/$SLURM_JOB_ID}" "$@"
