#!/usr/bin/env bash
# Everything that can be said about the code without running it: style, types, import direction.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
mypy
lint-imports
# `Stages` answers what code asks about a model cut into stages. Who compares with one stage all the same are the rules
# between sections, plans and the choice of rows (which have no Stages), and pipelining/ itself.
cut='\bif\b.*(\blayout\.pp\b|\bpp_size\b|\bpipeline is (not )?None)'
may='^(automodel_cli/(dryrun|pipelining|planning)/|automodel_cli/distributed/mesh_config\.py|automodel_cli/parity/(cases|option_cases)\.py|automodel_cli/run/(recipe|checks/mesh_checks|commands/plan|memory/memory_suggestions)\.py)'
if grep -rnE "$cut" automodel_cli recipes --include='*.py' | grep -vE "$may"; then
  echo "a question about pipeline stages: ask training.stages.Stages" >&2
  exit 1
fi
