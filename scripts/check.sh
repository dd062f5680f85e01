#!/usr/bin/env bash
# Everything that can be said about the code without running it: style, types, import direction.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
mypy
lint-imports
