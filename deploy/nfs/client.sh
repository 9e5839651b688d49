#!/usr/bin/env bash
# Mounts the directory that server.sh exports, now and at every boot. Run as root:
#
#   deploy/nfs/client.sh head:/srv/finray [/shared]
#
# `hard`: if the server is unavailable, programs wait instead of losing their writes. DRY_RUN=1 prints the commands
# without running them.
set -euo pipefail

source=${1:-}
target=${2:-/shared}
case $source in
  *:/*) ;;
  *)
    echo "usage: deploy/nfs/client.sh HOST:/DIRECTORY [/TARGET]" >&2
    exit 2
    ;;
esac
line="$source $target nfs4 rw,hard,noatime,nosuid,nodev,_netdev 0 0"

run() { if [ -n "${DRY_RUN:-}" ]; then echo "$*"; else "$@"; fi; }

run apt-get install --yes nfs-common
run mkdir -p "$target"
if grep -qsE "^[^#]\S*\s+$target\s" /etc/fstab; then
  echo "/etc/fstab has a line for $target already; it stays as it is"
elif [ -n "${DRY_RUN:-}" ]; then
  echo "/etc/fstab: $line"
else
  echo "$line" >> /etc/fstab
fi
run mount "$target"
