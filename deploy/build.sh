#!/usr/bin/env bash
# Builds an image: deploy/build.sh cpu|cuda [TAG]
#
# Uses docker, podman or buildah, whichever is installed (BUILDER selects one), and passes PIP_EXTRA_INDEX_URL and EXTRAS
# (such as s3,serve,wandb) on. DRY_RUN=1 prints the command. The build context contains only the tracked files that the image needs.
set -euo pipefail

kind=${1:-}
case $kind in
  cpu | cuda) ;;
  *)
    echo "usage: deploy/build.sh cpu|cuda [TAG]" >&2
    exit 2
    ;;
esac
tag=${2:-finray:$kind}
cd "$(dirname "$0")/.."

builder=${BUILDER:-}
for one in docker podman buildah; do
  if [ -z "$builder" ] && command -v "$one" > /dev/null; then builder=$one; fi
done
if [ -z "$builder" ]; then
  echo "there is no docker, podman or buildah here; install one, or name it with BUILDER" >&2
  exit 2
fi
verb=build
if [ "$(basename "$builder")" = buildah ]; then verb=bud; fi

context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
git archive HEAD constraints.txt pyproject.toml README.md LICENSE src deploy | tar -x -C "$context"
command=("$builder" "$verb" --file "$context/deploy/Dockerfile.$kind" --tag "$tag")
for one in PIP_EXTRA_INDEX_URL EXTRAS; do
  if [ -n "${!one:-}" ]; then command+=(--build-arg "$one=${!one}"); fi
done
command+=("$context")
if [ -n "${DRY_RUN:-}" ]; then
  echo "${command[*]}"
else
  "${command[@]}"
fi
