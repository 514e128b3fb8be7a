#!/usr/bin/env bash
# The agents' demo: a model of a million parameters learns to call a calculator, by GRPO with vLLM on the CPU.
# Everything it makes is in runs/calculator. `make demo-agent` sets up the environment first.
#
#   bash examples/calculator/demo.sh [SEED]
set -euo pipefail
seed=${1:-0}
run=runs/calculator
cd "$(dirname "$0")/../.."
export PYTHONPATH="examples/calculator${PYTHONPATH:+:$PYTHONPATH}"

rm -rf "$run"
python examples/calculator/make_calculations.py "$run" --seed "$seed"
rlightning fit --config configs/calculator_sft.yaml --seed_everything "$seed"
rlightning fit --config configs/calculator_grpo.yaml --seed_everything "$seed"
python examples/arithmetic/show_result.py "$run/grpo"
