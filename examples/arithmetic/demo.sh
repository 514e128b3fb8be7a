#!/usr/bin/env bash
# The demo: a model of a million parameters learns arithmetic, first from examples, then by GRPO with vLLM on the CPU.
# Everything it makes is in runs/arithmetic. `make demo` sets up the environment first.
#
#   bash examples/arithmetic/demo.sh [SEED]
set -euo pipefail
seed=${1:-0}
run=runs/arithmetic
cd "$(dirname "$0")/../.."

rm -rf "$run"
python examples/arithmetic/make_task.py "$run" --seed "$seed"
rlightning fit --config configs/arithmetic_sft.yaml --seed_everything "$seed"
rlightning fit --config configs/arithmetic_grpo.yaml --seed_everything "$seed"
python examples/arithmetic/show_result.py "$run/grpo"
