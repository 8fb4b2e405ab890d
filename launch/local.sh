#!/usr/bin/env bash
# Look whether this machine can do the run, then train; an interrupted run goes on where it was.
#   launch/local.sh CONFIG.toml [a.b=c ...]
set -euo pipefail
: "${1:?usage: launch/local.sh CONFIG.toml [a.b=c ...]}"
olmorl doctor "$@"
exec olmorl train "$@" --resume
