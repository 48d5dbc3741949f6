#!/usr/bin/env bash
# Half an hour of one GPU, in commands of at most ten minutes; README.md beside this file says in which order and why.
#
#   bash benchmarks/house/half_hour.sh pretrain | gpu | campaign | outliers | suite
#
# Reads CORPUS and DATA (../shared/corpus, ../shared/data), works in WORK (runs/half-hour) and goes on from what lies there. Writes to OUT
# (WORK/out), again every half a minute, so that whatever is stopped has left what it had: folders compressed, in parts of 14 MB
# (cat NAME.tgz.* | tar xz). Every other capital letter below is for trying it at a tiny size.
set -euo pipefail
cd "$(dirname "$0")/../.."
CORPUS=${CORPUS:-../shared/corpus} DATA=${DATA:-../shared/data} WORK=${WORK:-runs/half-hour} PYTHON=${PYTHON:-python}
OUT=${OUT:-$WORK/out} DEVICE=${DEVICE:-cuda} WORKERS=${WORKERS:-14} SECONDS_LEFT=${SECONDS_LEFT:-540}
MODEL=${MODEL:-models/house}
[ -d "$MODEL" ] || MODEL=$WORK/house/model
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-true} PYTHONUNBUFFERED=1
mkdir -p "$WORK" "$OUT"

pack() { # NAME FOLDER MEMBER...: what is there of a folder's members, as OUT/NAME.tgz.aa, .ab, ...
  local name=$1 folder=$2 found=() member aside
  for member in "${@:3}"; do [ -e "$folder/$member" ] && found+=("$member"); done
  [ ${#found[@]} -gt 0 ] || return 0
  aside=$(mktemp -d -p "$WORK")
  tar -C "$folder" -czf - --warning=no-file-changed --exclude=adapter --exclude="*.partial" "${found[@]}" | split -b 14m - "$aside/$name.tgz." || true
  rm -f "$OUT/$name.tgz".*
  mv "$aside"/* "$OUT/"
  rmdir "$aside"
}

packing() { # the same as long as what follows "--" runs, and once more behind it
  local what=() status=0 watcher
  while [ "$1" != -- ]; do what+=("$1"); shift; done
  (while sleep "${PACK_EVERY:-30}"; do pack "${what[@]}"; done) &
  watcher=$!
  "${@:2}" || status=$?
  kill "$watcher" 2>/dev/null || true
  wait "$watcher" 2>/dev/null || true
  pack "${what[@]}"
  return "$status"
}

campaign() { # SPECIFICATION FOLDER OPTION...
  local status=0
  packing "$2" "$WORK/$2" campaign.json runs failed report -- \
    timeout -s INT -k 20 "$SECONDS_LEFT" "$PYTHON" -m frozencore campaign run "$1" --output "$WORK/$2" --data-root "$DATA" \
    --device "$DEVICE" --workers "$WORKERS" "${@:3}" || status=$?
  "$PYTHON" -m frozencore campaign report "$WORK/$2" && pack "$2" "$WORK/$2" campaign.json runs failed report
  return "$status"
}

case ${1:-} in
  pretrain)
    # shellcheck disable=SC2086
    packing house "$WORK/house" history.jsonl model -- \
      "$PYTHON" benchmarks/house/pretrain.py --corpus "$CORPUS" --out "$WORK/house" --resume --device "$DEVICE" ${PRETRAIN:---minutes 8}
    ;;
  gpu)
    # shellcheck disable=SC2086
    "$PYTHON" benchmarks/gpu.py --out "$OUT/gpu.json" ${GPU:-}
    ;;
  campaign) campaign "${CAMPAIGN:-campaigns/house.yaml}" house-campaign --model-path "house=$MODEL" ;;
  outliers)
    mapfile -t paths < <("$PYTHON" benchmarks/house/rescale.py --model "$MODEL" --out "$WORK/spreads" | tr ' ' '\n')
    campaign "${CAMPAIGN:-campaigns/outliers.yaml}" house-outliers "${paths[@]}"
    ;;
  suite) "$PYTHON" -m pytest -q tests/test_on_cuda.py tests/adapter/test_core_operator.py 2>&1 | tee "$OUT/suite.txt" ;;
  *) sed -n 's/^# \{0,1\}//p' "$0" | sed '/^!/d' >&2; exit 2 ;;
esac
