#!/usr/bin/env bash
# Everything that the GPUs of this machine can tell of this program, 8 minutes per call:
#   scripts/gpu_suite.sh [OUT.json] [NAME ...]
# Goes on where it was stopped; a piece that failed is run again. 77 where there is no CUDA device. Never run on one yet.
# --fake needs no GPU: it traces the steps on fake CUDA tensors.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" scripts/gpu_suite.py "${@:-gpu_suite.json}"
