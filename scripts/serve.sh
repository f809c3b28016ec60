#!/bin/sh
# Starts the MCP server for agent hosts: from this folder's .venv, from the PATH, or through uvx.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
if [ -x "$here/.venv/bin/stillroom" ]; then exec "$here/.venv/bin/stillroom" serve "$@"; fi
if command -v stillroom >/dev/null; then exec stillroom serve "$@"; fi
# Without [train] it starts within a host's patience; check_setup says how to add the rest.
if command -v uvx >/dev/null; then exec uvx --from "$here" stillroom serve "$@"; fi
echo "stillroom is not installed: run 'make setup' in $here, or 'pip install $here[train]'" >&2
exit 1
