#!/usr/bin/env bash
# Runs the tests that need a GPU and then every benchmark, on the machine it is started on:
#
#   benchmarks/device.sh OUT_DIR [TOPIC ...]
#
# OUT_DIR gets <device>/<topic>.json (the rows) and device.log (all output). A TOPIC is the name of a
# file in benchmarks/ without ".py", or "tests"; without one, all of them run. What fails is named at
# the end and does not stop the rest; the exit status is 1 if anything failed.
#
# Needs python3 with torch, numpy, rich, typer and pytest; Penstock itself need not be installed.
# DEVICE=cpu tries the script where there is no GPU. PENSTOCK_COMMIT names the commit where .git is
# absent. PENSTOCK_DATA is the directory of the data sets that some topics read.
set -uo pipefail

if [[ $# -lt 1 || $1 == -* ]]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
fi
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
shift
cd "$(dirname "$0")/.." || exit 2

device=${DEVICE:-cuda}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export PENSTOCK_CACHE_DIR=${PENSTOCK_CACHE_DIR:-$(mktemp -d)} # private; and platformdirs may be missing

all_topics() {
    echo tests
    for file in benchmarks/*.py; do
        name=$(basename "$file" .py)
        [[ $name == _* ]] || echo "$name"
    done
}

run_topic() {
    case $1 in
        tests) python3 -m pytest -m gpu -p no:cacheprovider --continue-on-collection-errors ;;
        *) python3 "benchmarks/$1.py" --device "$device" --out "$out" ;;
    esac
}

main() {
    local topic start status failed=0 summary=()
    if [[ $device == cuda* ]] && ! python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        echo "No CUDA device, or no torch that can use it. DEVICE=cpu tries the script without one." >&2
        return 1
    fi
    for topic in "$@"; do
        echo
        echo "== $topic"
        start=$SECONDS
        if run_topic "$topic"; then
            status="ok"
        else
            status="FAILED (exit status $?)"
            failed=1
        fi
        summary+=("$(printf '%-24s %5d s  %s' "$topic" $((SECONDS - start)) "$status")")
    done
    echo
    echo "== summary"
    printf '%s\n' "${summary[@]}"
    return $failed
}

if [[ $# -eq 0 ]]; then
    mapfile -t topics < <(all_topics)
    set -- "${topics[@]}"
fi
main "$@" 2>&1 | tee "$out/device.log"
exit "${PIPESTATUS[0]}"
