#!/usr/bin/env bash
# Two nodes of eight GPUs with ZeRO-2: sbatch docs/slurm.sh configs/qwen2.5-7b.yaml, from a copy whose numbers per rank
# (prompts_per_rollout, steps_per_generation, accumulate_grad_batches) are those of 16 ranks: 8, 8 and 2, a quarter of the file's.
# Four nodes: sbatch --nodes=4, with 4, 4 and 1 (docs/scaling.md, "More machines").
# Half an hour before the time limit the run is told to save after its optimizer step, and the job queues again. The
# signal is only noted until then: the time must be longer than one rollout, one optimizer step and one save.
#SBATCH --job-name=sparse-rl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@1800
#SBATCH --requeue
set -uo pipefail

config=$1
value() { sed -n "s/.*$1: *\([^,} ]*\).*/\1/p" "$config" | head -1; }
dirpath=$(value dirpath)
: "${dirpath:=$(value default_root_dir)/checkpoints}" # where RolloutCheckpoint writes if it is not told
resume=()
# a job killed while it replaced the folder has left it in .replaced, from where it is brought back
for old in "$dirpath/last.ckpt" "$dirpath/.replaced/last.ckpt"; do
  if [[ -e "$old" || -L "$old" ]]; then resume=(--ckpt_path=last); fi
done

# srun does not take the job's CPUs per task by itself; a task that fails ends the others
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 sparse-rl fit --config "$config" --trainer.strategy=sparse_rl_deepspeed_stage_2 \
  --trainer.devices=8 --trainer.num_nodes="$SLURM_NNODES" "${resume[@]}" &
run=$!

preempted=0
trap 'preempted=1; kill -USR1 "$run"' USR1 # srun passes it on to all ranks
status=0
while kill -0 "$run" 2> /dev/null; do
  wait "$run"
  status=$?
done
if ((preempted && status == 0)); then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
