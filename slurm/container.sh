# shellcheck shell=bash disable=SC2034,SC2154
# Sourced where a job starts from. In a container, if site.env names one: `inside` precedes programs,
# `container` is what srun takes.
inside=() container=()
mounts=$clone,$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}
if [[ ${CONTAINER:-} == *.sif ]]; then
  inside=(apptainer exec --nv --bind "$mounts" --pwd "$PWD" "$CONTAINER")
elif [[ ${CONTAINER:-} ]]; then # pyxis, which has srun start enroot
  container=("--container-image=$CONTAINER" "--container-workdir=$PWD")
  container+=("--container-mounts=$(sed -E 's/([^,:]+)(,|$)/\1:\1\2/g' <<<"$mounts")")
fi
