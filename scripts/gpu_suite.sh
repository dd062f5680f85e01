#!/usr/bin/env bash
# Everything that one GPU can tell of this program, in at most 8 minutes: scripts/gpu_suite.sh [OUT.json]
# Goes on where it was stopped; a piece that failed is run again. 77 where there is no CUDA device. Never run on one yet.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" scripts/gpu_suite.py "${1:-gpu_suite.json}"
