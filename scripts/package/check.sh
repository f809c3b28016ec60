#!/bin/sh
# Builds the wheel, the sdist and the bundle into dist/ and checks each with its own validator.
# The wheel is installed into a fresh environment, where the server must start.
set -eu
cd "$(dirname "$0")/../.."
BIN=.venv/bin
say() { printf '%s\n' "$*" >&2; }

"$BIN/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt build twine
rm -rf dist
"$BIN/python" -m build --outdir dist . >/dev/null
"$BIN/python" -m twine check --strict dist/*
bundle=$("$BIN/python" scripts/package/bundle.py dist)

if command -v npx >/dev/null; then
  unpacked=$(mktemp -d)
  "$BIN/python" -m zipfile -e "$bundle" "$unpacked"
  npx --yes @anthropic-ai/mcpb@2 validate "$unpacked/manifest.json"
  rm -r "$unpacked"
  npx --yes @anthropic-ai/claude-code@2 plugin validate . --strict
  # Not strictly: it warns that a plugin's users do not get our CLAUDE.md, which is meant so.
  npx --yes @anthropic-ai/claude-code@2 plugin validate .claude-plugin/plugin.json
else
  say "not checked: $bundle and the plugin, whose validators need Node (npx)"
fi

# As `uvx stillroom` and pipx do, without what is installed here.
fresh=$(mktemp -d)
"$BIN/python" -m venv "$fresh"
"$fresh/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
(
  cd "$fresh"
  bin/stillroom --version
  bin/stillroom setup claude-code --workspace . --print
  bin/python "$OLDPWD/scripts/package/list_tools.py" bin/stillroom
)
rm -r "$fresh"
say "built and checked: $(ls dist | tr '\n' ' ')"
