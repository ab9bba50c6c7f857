#!/bin/bash
# Trains on one of the nodes of a job without Slurm, such as a pod of Kubernetes, and ends as slurm/train.sbatch
# does: nodes are checked first, and the exit code is the run's own, which torchrun would turn into 1. Started on
# every node:
#
#   NODES=2 NODE_RANK=0 GPUS=8 MASTER_ADDR=node1 bash slurm/node.sh --deepspeed ds_configs/zero3.json run.dir=runs/first
#
# NODE_RANK is 0 on the first node, MASTER_ADDR its name. All nodes must see the clone and run.dir. Relative paths
# start from the clone. A restart with the same arguments resumes the run. Without GPUS, CPU_RANKS_PER_NODE ranks of
# slurm/site.env run on CPUs. RETRY_PLUS is added to codes below 128 after which the job is to start again.
set -uo pipefail

refuse() { # what no other attempt would mend
  echo "not started again: $*"
  exit 2
}

cd "$(dirname "${BASH_SOURCE[0]}")/.." && source slurm/site.env || refuse "no clone with a readable slurm/site.env here"
PATH=${VIRTUAL_ENV:+$VIRTUAL_ENV/bin:}$PATH # an image has its own Python
nodes=${NODES:-1} node=${NODE_RANK:-0} port=${MASTER_PORT:-29500}
export MASTER_ADDR=${MASTER_ADDR:-localhost}
ranks=${GPUS:-0}
if ((ranks == 0)); then
  ranks=${CPU_RANKS_PER_NODE:-1}
  export DS_ACCELERATOR=cpu OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
fi

# A pod that is evicted gets SIGTERM. Its ranks are told: one decision of all, a checkpoint, and code 75.
warned='' pids=()
trap 'warned=1; ((${#pids[@]} == 0)) || kill -TERM "${pids[@]}" 2>/dev/null' TERM INT USR1

# Has rank 0, which may be on another node, recorded that this attempt ended?
is_over() {
  grep -q '"code": [0-9]' "$run_dir/status.json" && ! grep -q "\"attempt\": ${attempt_before:-0}," "$run_dir/status.json"
} 2>/dev/null

# Starts a rank for every GPU; the highest exit code of this node's is in $code. Ranks that wait for one that is gone
# would wait for ever: they are killed so many seconds after the first of all. Not at once: their own codes say why.
on_all_ranks() { # SECONDS PORT SCRIPT [ARGUMENT...]
  local wait_s=$1 rank own end=''
  export WORLD_SIZE=$((nodes * ranks)) LOCAL_WORLD_SIZE=$ranks MASTER_PORT=$2
  shift 2
  code=75
  [[ $warned ]] && return
  for ((rank = 0; rank < ranks; rank++)); do
    RANK=$((node * ranks + rank)) LOCAL_RANK=$rank python "$@" &
    pids+=($!)
  done
  [[ $warned ]] && kill -TERM "${pids[@]}"
  code=0
  while ((${#pids[@]})); do
    sleep 0.5
    for rank in "${!pids[@]}"; do
      kill -0 "${pids[rank]}" 2>/dev/null && continue
      wait "${pids[rank]}"
      own=$?
      ((own > code)) && code=$own
      unset "pids[rank]"
      end=${end:-$((SECONDS + wait_s))}
    done
    [[ $end ]] || ! is_over || end=$((SECONDS + wait_s))
    [[ ! $end ]] || ((SECONDS < end || ${#pids[@]} == 0)) || kill -KILL "${pids[@]}"
  done
}

ask() { # a question of this script's own
  python tools/batch_job.py "$@"
}
run_dir=$(ask run-dir "$@") || refuse "see the messages above (with $(command -v python || echo no python))"
[[ $run_dir ]] || refuse "set run.dir to a folder that all nodes see: the run resumes there"
attempt_before=$(ask attempt "$run_dir")

code=0 program=preflight.py
# Pods come when their image is there and a node is free: half of this time is for all to come.
[[ ${PREFLIGHT:-1} == 0 ]] || on_all_ranks 180 "$port" tools/preflight.py --limit-s "${PREFLIGHT_S:-1200}" "$@"
if ((code == 0)); then
  program=train.py
  on_all_ranks "${STRAGGLER_S:-60}" "$((port + 1))" harness/train.py "$@"
fi

# An end is counted once, by the first node; a stop from outside says nothing about the run.
counts=''
((node == 0)) && [[ ! $warned ]] || counts=--uncounted
answer=$(ask verdict "$program" "$code" "$run_dir" "${attempt_before:-0}" ${warned:+--warned} $counts)
code=$?
case $code in 0 | 2 | 74 | 76 | 77 | 79) exit "$code" ;; esac
[[ $answer == requeue ]] || refuse "it ended too often without progress"
exit "$((code < 128 ? code + ${RETRY_PLUS:-0} : code))"
