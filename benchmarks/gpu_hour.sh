#!/bin/bash
# The first half hour on a GPU, in six calls of at most ten minutes, each useful alone:
#
#     OUT=DIR benchmarks/gpu_hour.sh 1 .. 6       # what is done is not done again: call one that was cut short once more
#     python benchmarks/gpu_hour.py --page DIR    # one page of all that was found, each target met or missed
#     OUT=DIR benchmarks/gpu_hour.sh 3 --device cpu --small    # the same code on a CPU, in seconds
#
# 1 does it run, 2 steady steps, 3 beside torch.compile, 4 offload is exact, 5 offload is fast, 6 CUDA graphs and fp8.
# Results are JSON under $OUT; compiled functions are kept there too.
set -u
out=${OUT:-gpu_hour}
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH=$(dirname "$here")${PYTHONPATH:+:$PYTHONPATH}
case " $* " in *" -h "* | *" --help "* | *" --list "* | *" --page "*) exec python "$here/gpu_hour.py" "$@" ;; esac
python "$here/gpu_hour.py" --ready "$@" || exit
mkdir -p "$out"
export PYTHONUNBUFFERED=1 FZERO_PROGRESS=off FZERO_CACHE=${FZERO_CACHE:-$(cd "$out" && pwd)/cache}
python "$here/gpu_hour.py" --out "$out" "$@" 2>&1 | tee -a "$out/log_${1:-}.txt"
exit "${PIPESTATUS[0]}"
