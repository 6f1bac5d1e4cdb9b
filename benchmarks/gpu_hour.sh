#!/bin/bash
# The first half hour on a GPU, in four calls of at most nine minutes, each useful alone:
#
#     OUT=DIR benchmarks/gpu_hour.sh 1 .. 4        # what is done is not done again: call one that was cut short once more
#     OUT=DIR benchmarks/gpu_hour.sh 1 --wheels W  # first unpacks the wheels in a folder: a machine without an index
#     benchmarks/gpu_hour.sh --page DIR            # one page of all that was found, each target met or missed
#     OUT=DIR benchmarks/gpu_hour.sh 1 2 3 4 --device cpu --small    # the same code on a CPU, in minutes
#
# 1 does it run, and what a step does; 2 beside torch.compile; 3 offload; 4 fp8 and the rest. --help says more.
set -u
here=$(cd "$(dirname "$0")" && pwd)
given=() wheels=
while [ $# -gt 0 ]; do
    case $1 in
    --wheels)
        wheels=${2:?"gpu_hour.sh: --wheels names a folder of wheels"}
        compgen -G "$wheels/*.whl" > /dev/null || { echo "gpu_hour.sh: no wheels in $wheels" >&2 && exit 2; }
        shift
        ;;
    *) given+=("$1") ;;
    esac
    shift
done
root=$(dirname "$here")
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 FZERO_PROGRESS=off
if [ -n "$wheels" ]; then
    site=$(mktemp -d)
    python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl || exit
    export PYTHONPATH=$PYTHONPATH:$site
fi
exec python3 "$root/tests/cuda_stub/gpu_hour.py" ${given[@]+"${given[@]}"}
