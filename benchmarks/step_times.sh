#!/usr/bin/env bash
# The time of an LSTM's step by batch size (BatchMaker's Figure 3): half a minute on a machine that is otherwise idle.
# Usage: benchmarks/step_times.sh [OUT] [--quick] - batches of up to 32 with --quick, kept in OUT, or nowhere without it.
set -euo pipefail
most=512
if [ "${*: -1}" = --quick ]; then
    most=32
    set -- "${@:1:$#-1}"
    set -- "${1:-$(mktemp -d)}"
fi
out=${1:-$(dirname "$0")/results}
mkdir -p "$out"
batchmaker profile lstm --dtype bfloat16 --max $most --json "$out/profile-lstm.json" --png "$out/profile-lstm.png"
python "$(dirname "$0")/provenance.py" "$out/profile-lstm.json" --measures src/batchmaker/{compile,kernels/cpu,cli/cell_times.py} \
    src/batchmaker/lab/zoo
