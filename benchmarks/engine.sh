#!/usr/bin/env bash
# Every figure of policies in docs/benchmarks.md, in one go: about ten minutes on two cores that are otherwise idle.
# Usage: benchmarks/engine.sh DATA [OUT] [--quick] - DATA holds europarl_deen/raw5k.{de,en} and sst/train.txt; with
# --quick windows of half a second (some minutes in all: settings are swept), kept in OUT, or nowhere without it.
set -euo pipefail
seconds() { echo "$1"; }
if [ "${*: -1}" = --quick ]; then
    seconds() { echo 0.5; }
    set -- "${@:1:$#-1}"
    set -- "${1:?usage: benchmarks/engine.sh DATA [OUT] [--quick]}" "${2:-$(mktemp -d)}"
fi
data=${1:?usage: benchmarks/engine.sh DATA [OUT] [--quick]}
out=${2:-$(dirname "$0")/results}
mkdir -p "$out"
english=$data/europarl_deen/raw5k.en
german=$data/europarl_deen/raw5k.de
both=(--policy cellular --policy padded)

for dtype in bfloat16 float32; do
    batchmaker bench lstm --data "$english" --dtype $dtype "${both[@]}" --seconds "$(seconds 8)" --json "$out/lstm-$dtype.json"
    batchmaker bench lstm --data "$english" --dtype $dtype "${both[@]}" --load 0.5 --seconds "$(seconds 10)" --json "$out/lstm-$dtype-half.json"
    batchmaker bench lstm --lengths fixed:24 --dtype $dtype --policy cellular --seconds "$(seconds 6)" --json "$out/lstm-$dtype-fixed.json"
done
batchmaker bench seq2seq --data "$german" --data "$english" --dtype bfloat16 "${both[@]}" --seconds "$(seconds 15)" --json "$out/seq2seq.json"
batchmaker bench seq2seq --data "$german" --data "$english" --dtype bfloat16 "${both[@]}" --load 0.5 --seconds "$(seconds 20)" --json "$out/seq2seq-half.json"
batchmaker bench treelstm --data "$data/sst/train.txt" --hidden 256 --threads 1 --policy cellular --requests 8544 --json "$out/treelstm.json"

made=("$out"/lstm-{bfloat16,float32}{,-half,-fixed}.json "$out"/seq2seq{,-half}.json "$out"/treelstm.json)
python "$(dirname "$0")/provenance.py" "${made[@]}" --measures src/batchmaker/{compile,engine,executor,kernels/cpu,lab/baselines,lab/zoo,scheduler} \
    src/batchmaker/policies/cellular.py src/batchmaker/cli/bench
