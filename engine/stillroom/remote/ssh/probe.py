"""Probes a machine's hardware and software with a script that only needs a POSIX shell."""

import re
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from stillroom import bounds
from stillroom.remote.channel import Channel, run_script, shell_words
from stillroom.remote.records import MachineFacts

MIN_PYTHON = (3, 11)
_NAMES = frozenset(
    {"clock", "system", "python", "uv", "processors", "memory", "blocked", "disk", "gpu"}
    | {"code", "version", "ready"}
)
"""The first words of the script's output lines; other lines are ignored."""
_MAX_VALUES, _MAX_VALUE_CHARS = bounds.PROBED_VALUES.limit, bounds.PROBED_VALUE.limit
# A session without a login shell often lacks paths that the user's start files add.
PATHS = (
    'PATH="$PATH:$HOME/.local/bin:$HOME/.cargo/bin:/usr/local/bin:/opt/conda/bin'
    ":$HOME/miniconda3/bin:$HOME/miniforge3/bin:/opt/homebrew/bin:/usr/local/nvidia/bin"
    ':/usr/lib/wsl/lib"'
)
_PYTHON_SCRIPT = """
import sys
try:
    import ensurepip
    has_pip = 1
except ImportError:
    has_pip = 0
print("%d.%d.%d %d %s" % (sys.version_info[:3] + (has_pip, sys.executable)))
"""
_SCRIPT = """
{paths}
folder={folder}
echo "clock $(date +%s.%N)"
echo "system $(uname -s) $(uname -r) $(uname -m)"
for name in {pythons}; do
  found=$(command -v "$name" 2>/dev/null) || continue
  about=$("$found" -c {python_script} 2>/dev/null </dev/null) && echo "python $about"
done
command -v uv >/dev/null 2>&1 && echo "uv $(command -v uv)"
echo "processors $(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN || sysctl -n hw.ncpu)"
[ -r /proc/meminfo ] && awk '/^MemTotal/ {{print "memory", $2 * 1024}}' /proc/meminfo
[ -r /proc/meminfo ] || echo "memory $(sysctl -n hw.memsize)"
for file in /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes; do
  [ -r "$file" ] && echo "memory $(cat "$file")"
done
parent=$folder
while [ ! -d "$parent" ]; do [ -e "$parent" ] && blocked=$parent; parent=$(dirname "$parent"); done
[ -w "$parent" ] || blocked=${{blocked:-$parent}}
case $(stat -f -c %T "$parent" 2>/dev/null) in proc|sysfs|devpts|cgroup*) blocked=$parent;; esac
echo "blocked ${{blocked:-}}"
df -Pk "$parent" | awk 'END {{print "disk", $4 * 1024}}'
limit=$(command -v timeout)
query="--query-gpu=memory.total,driver_version,name --format=csv,noheader,nounits"
${{limit:+"$limit" 20}} nvidia-smi $query 2>/dev/null | sed 's/^/gpu /'
[ -d "$folder/code/{code}" ] && echo "code {code}"
for file in "$folder"/code/*/stillroom/__init__.py; do
  [ -r "$file" ] && sed -n 's/^__version__ = "\\(.*\\)"/version \\1/p' "$file"
done
ready=$(cat "$folder/code/{code}.python" 2>/dev/null)
[ -x "$ready" ] && echo "ready $ready"
true
"""


@dataclass(frozen=True, slots=True)
class RemotePython:
    """A Python interpreter on the machine."""

    path: str
    version: tuple[int, ...]
    has_pip: bool
    """Whether it has ensurepip, which installs pip into a new environment."""

    @property
    def is_new_enough(self) -> bool:
        """Whether Stillroom supports this version."""
        return self.version >= MIN_PYTHON


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of probing a machine."""

    facts: MachineFacts
    pythons: list[RemotePython]
    """The interpreters in order of preference."""
    uv: str | None
    """The path of uv; None if it is not installed."""
    ready_python: str | None
    """The interpreter of an existing environment with exactly this code; None if there is none."""

    @property
    def python(self) -> RemotePython | None:
        """The first Python that is new enough; None if there is none."""
        return next((python for python in self.pythons if python.is_new_enough), None)


def probe(channel: Channel, folder: str, *, code: str, pythons: Sequence[str]) -> Probe:
    """Probes a machine without changing anything; `pythons` are names or paths to try."""
    script = _SCRIPT.format(
        paths=PATHS,
        folder=shell_words([folder]),
        code=code,
        pythons=shell_words(pythons),
        python_script=shell_words([_PYTHON_SCRIPT.strip()]),
    )
    values = defaultdict[str, list[str]](list)
    with run_script(channel, script) as script_run:
        started_at = time.time()
        script_run.write(b"")
        for line in script_run.lines():
            name, _, value = line.partition(" ")
            if name in _NAMES and len(values[name]) < _MAX_VALUES:
                values[name].append(value.strip()[:_MAX_VALUE_CHARS])
    return _parse_probe(values, started_at, code)


def _parse_probe(values: dict[str, list[str]], started_at: float, code: str) -> Probe:
    """Returns a probe from the script's output: the values of each name, in order.

    started_at: the local time (s since the epoch) when the script started.
    """
    parsed = map(_parse_python, values["python"])
    pythons = {python.path: python for python in parsed if python is not None}
    gpus = [gpu.split(", ", 2) for gpu in values["gpu"] if gpu.count(", ") >= 2]
    memory_gb = [_gibibytes(gpu[0]) for gpu in gpus]
    new_enough = [python for python in pythons.values() if python.is_new_enough]
    chosen = next(iter(new_enough or pythons.values()), None)
    clock = _first_number(values["clock"])
    facts = MachineFacts(
        system=_first_nonempty(values["system"]) or "unknown",
        python=chosen.path if chosen else None,
        python_version=".".join(map(str, chosen.version)) if chosen else None,
        has_uv=bool(values["uv"]),
        num_processors=int(_first_number(values["processors"]) or 0) or None,
        memory_gb=_min_gb(values["memory"]),
        free_disk_gb=None if (disk := _first_number(values["disk"])) is None else disk / 1e9,
        blocked_folder=_first_nonempty(values["blocked"]),
        gpus=[f"{gpu[2]}, {size:.1f} GB" for gpu, size in zip(gpus, memory_gb, strict=True)],
        gpu_memory_gb=memory_gb,
        driver=gpus[0][1] if gpus else None,
        stillroom_version=_first_nonempty(values["version"]),
        has_same_code=values["code"] == [code],
        clock_ahead_s=None if clock is None else round(clock - started_at, 3),
    )
    return Probe(
        facts=facts,
        pythons=list(pythons.values()),
        uv=_first_nonempty(values["uv"]),
        ready_python=_first_nonempty(values["ready"]),
    )


def _parse_python(line: str) -> RemotePython | None:
    """Parses a line that `_PYTHON_SCRIPT` printed; returns None for any other line."""
    parts = re.fullmatch(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4}) ([01]) (\S.*)", line, re.ASCII)
    if parts is None:
        return None
    *version, has_pip, path = parts.groups()
    return RemotePython(path, tuple(map(int, version)), has_pip == "1")


def _gibibytes(mebibytes: str) -> float:
    """Returns a GPU's memory in GiB; 0 if nvidia-smi does not report it, as with shared memory."""
    return round((_first_number([mebibytes]) or 0.0) / 1024, 1)


def _first_nonempty(values: Sequence[str]) -> str | None:
    return next((value for value in values if value), None)


def _first_number(values: Sequence[str]) -> float | None:
    """Returns the leading number of the first value that is not empty; None if there is none."""
    # A `date` without %N prints `1700000000.N`.
    number = re.match(r"\d{1,20}(\.\d{1,20})?(e\+\d\d?)?", _first_nonempty(values) or "", re.ASCII)
    return float(number[0]) if number else None


def _min_gb(values: Sequence[str]) -> float | None:
    """Returns the smallest value in GB: the machine's memory, or a container's lower limit."""
    sizes = [size for value in values if (size := _first_number([value])) is not None]
    return min(sizes) / 1e9 if sizes else None
