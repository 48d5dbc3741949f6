#!/usr/bin/env bash
# Half an hour of one GPU, in commands of at most ten minutes, the most important first:
#
#   bash benchmarks/half_hour.sh gpu             # steps, calibration, peaks: gpu.json; about eight minutes, alone on the device
#   bash benchmarks/half_hour.sh campaign FILE   # a campaign, 14 processes side by side, nine minutes at a time; goes on when it is called again
#   bash benchmarks/half_hour.sh outliers        # lab/campaigns/outliers.yaml on MODEL, a Llama or Qwen2 folder
#   bash benchmarks/half_hour.sh suite           # the tests that need a device
#
# Reads DATA (../shared/data), works in WORK (runs/half-hour). Writes to OUT (WORK/out), again every half a minute, so that a command that is
# stopped leaves what it had: folders compressed, in parts of 14 MB. Afterwards, on any machine:
#
#   cat pocket.tgz.* | tar xz -C lab/results/pocket      # records and report of lab/campaigns/pocket.yaml
#   cp gpu.json benchmarks/results/gpu.json && python benchmarks/cost_page.py
#
# WORKERS, DEVICE, SECONDS_LEFT and PACK_EVERY are for trying it at a tiny size.
set -euo pipefail
cd "$(dirname "$0")/.."
DATA=${DATA:-../shared/data} WORK=${WORK:-runs/half-hour} PYTHON=${PYTHON:-python}
OUT=${OUT:-$WORK/out} DEVICE=${DEVICE:-cuda} WORKERS=${WORKERS:-14} SECONDS_LEFT=${SECONDS_LEFT:-540}
export PYTHONPATH=$PWD/src:$PWD/lab/src${PYTHONPATH:+:$PYTHONPATH} TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-true} PYTHONUNBUFFERED=1
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
  gpu)
    # shellcheck disable=SC2086
    "$PYTHON" benchmarks/gpu.py --out "$OUT/gpu.json" ${GPU:-}
    ;;
  campaign) campaign "${2:?campaign needs a file: lab/campaigns/pocket.yaml}" "$(basename "$2" .yaml)" "${@:3}" ;;
  outliers)
    mapfile -t paths < <("$PYTHON" benchmarks/rescale.py --model "${MODEL:?outliers needs MODEL=DIR}" --out "$WORK/spreads" | tr ' ' '\n')
    campaign "${CAMPAIGN:-campaigns/outliers.yaml}" outliers "${paths[@]}"
    ;;
  suite) "$PYTHON" -m pytest -q tests/test_on_cuda.py tests/adapter/test_core_operator.py 2>&1 | tee "$OUT/suite.txt" ;;
  *) sed -n 's/^# \{0,1\}//p' "$0" | sed '/^!/d' >&2; exit 2 ;;
esac
