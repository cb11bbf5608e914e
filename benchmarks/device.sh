#!/usr/bin/env bash
# Measures on the GPU of the machine it is started on, within a number of minutes:
#
#   benchmarks/device.sh OUT_DIR [--minutes 9] [--after DIR] [--dry-run] [TOPIC ...]
#   benchmarks/device.sh --fetch-wheels DIR      # beforehand, where packages can be downloaded
#
# `benchmarks/device.sh --help` has all options, docs/measuring.md the rest.
cd "$(dirname "$0")/.." && exec "${PYTHON:-python3}" benchmarks/_device.py --from "$OLDPWD" "$@"
