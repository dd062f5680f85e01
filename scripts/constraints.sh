#!/usr/bin/env bash
# Renew constraints.txt: the newest releases that pyproject.toml allows, for Python 3.11 and later. Needs `pip install uv`.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=(dev docs eval mcp rewards s3 sweep)
# Packages that only .ci/run installs, for tests of optional features.
printf '%s\n' 'moto[server]' bitsandbytes pytest-rerunfailures torchao |
    uv pip compile --universal --python-version 3.11 --upgrade --quiet --strip-extras --no-annotate \
        --custom-compile-command scripts/constraints.sh "${extras[@]/#/--extra=}" --output-file constraints.txt pyproject.toml -
