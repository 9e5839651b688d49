#!/usr/bin/env bash
# Exports a directory over NFS to the given machines, on Debian or Ubuntu. Run as root:
#
#   deploy/nfs/server.sh /srv/finray 10.0.0.11 10.0.0.12
#
# The directory belongs to one user (OWNER=uid:gid, 1000:1000 by default), and nobody else can read it. The user must
# have the same uid on all machines. DRY_RUN=1 prints the commands without running them.
set -euo pipefail

directory=${1:-}
if [ $# -lt 2 ] || [ "${directory#/}" = "$directory" ]; then
  echo "usage: deploy/nfs/server.sh /DIRECTORY HOST..." >&2
  exit 2
fi
shift
for host in "$@"; do
  case $host in
    *[!A-Za-z0-9.:_-]* | -*)
      echo "name machines, or their addresses: '$host' is none. A whole network, or everybody, is not exported to." >&2
      exit 2
      ;;
  esac
done
owner=${OWNER:-1000:1000}
options="rw,sync,no_subtree_check,root_squash"
line=$directory
for host in "$@"; do line+=" $host($options)"; done
file=/etc/exports.d/finray.exports

run() { if [ -n "${DRY_RUN:-}" ]; then echo "$*"; else "$@"; fi; }

run apt-get install --yes nfs-kernel-server
run install --directory --mode=0770 --owner="${owner%%:*}" --group="${owner##*:}" "$directory"
run mkdir -p /etc/exports.d
if [ -n "${DRY_RUN:-}" ]; then
  echo "$file: $line"
else
  echo "$line" > "$file"
fi
run exportfs -ra
echo "exported $directory to $*; on each of them: deploy/nfs/client.sh $(hostname -f 2> /dev/null || hostname):$directory"
