"""Processes: telling one from another, ending it with its parent, killing all that it started.

Many small processes load this module when they start, so it imports nothing slow at its top.
"""

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

    import psutil

SERVER_MARK_VARIABLE = "STILLROOM_SESSION"
"""The environment variable that marks all processes of one tool server.

The server's children inherit it, so they can be found even after the server has ended.
"""
RUN_MARK_VARIABLE = "STILLROOM_RUN_MARK"
"""The environment variable that marks all processes of one run that has a keeper."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_WATCH_S = 0.5
_PROC_PIDTBSDINFO = 3
_BSD_INFO_BYTES = 136
_BSD_INFO_START = 120
"""Where `struct proc_bsdinfo` of macOS holds the start time: two 64-bit numbers, s and µs."""
_START_FIELD = 19
"""The place of `starttime` in /proc/PID/stat, counted from the field after the name."""


def process_start(pid: int) -> str | None:
    """Returns a text that tells a process from all others with its pid; None if it has ended.

    It does not change when the machine's clock is set: on Linux it is the boot's id and the ticks
    from the boot to the process's start, on macOS the start time that the kernel noted.
    """
    if sys.platform == "linux":
        return _linux_start(pid)
    if sys.platform == "darwin":
        return _macos_start(pid)
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.NoSuchProcess:
        return None


def _linux_start(pid: int) -> str | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name is in parentheses, and may hold blanks and parentheses itself.
    fields = stat.rpartition(b")")[2].split()
    if fields[0] in (b"Z", b"X"):
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{fields[_START_FIELD].decode()}"


def _macos_start(pid: int) -> str | None:
    buffer = ctypes.create_string_buffer(_BSD_INFO_BYTES)
    libproc = ctypes.CDLL("/usr/lib/libproc.dylib")
    size = libproc.proc_pidinfo(pid, _PROC_PIDTBSDINFO, ctypes.c_uint64(0), buffer, _BSD_INFO_BYTES)
    # A zombie has no such information.
    return buffer.raw[_BSD_INFO_START:].hex() if size == _BSD_INFO_BYTES else None


def end_with_parent(parent: int) -> None:
    """Has this process killed when its parent, whose pid is given, ends.

    On Linux the kernel does it, even if a call in this process hangs; elsewhere a thread does.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()
    # It may have ended before it was watched.
    if process_start(parent) is None:
        os.kill(os.getpid(), signal.SIGKILL)


def _watch_parent(first: int) -> None:
    while os.getppid() == first:
        time.sleep(_WATCH_S)
    os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> bool:
    """Makes this process the parent of descendants whose own parent ends; False if it cannot."""
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0


def memory_share() -> int:
    """Returns the most bytes of memory for a process that runs user code: half the machine's.

    At least 4 GB, so that small machines can load what their tools import.
    """
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return max(4 << 30, pages * page // 2)


def limit_this_process(*, cpu_s: float | None = None, memory_bytes: int | None = None) -> None:
    """Limits the CPU seconds that this process takes from now on, and its memory.

    Over the CPU limit the system kills it; over the memory limit an allocation fails. macOS
    enforces the CPU limit only.
    """
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if cpu_s is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        whole = int(used.ru_utime + used.ru_stime + cpu_s) + 1
        _lower(resource.RLIMIT_CPU, whole)
    if memory_bytes is not None:
        # Not RLIMIT_AS, which counts the address space that CUDA and thread pools only reserve.
        _lower(resource.RLIMIT_DATA, memory_bytes)


def _lower(kind: int, limit: int) -> None:
    """Sets the soft limit, which can be raised again, within the hard one."""
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    # Some systems refuse limits that they do not know.
    with suppress(OSError, ValueError):
        resource.setrlimit(kind, (limit, hard))


def end_process(process: "subprocess.Popen[Any]", *, grace_s: float = 5.0) -> None:
    """Ends a child process: asks it to terminate, and kills it if it still runs after the grace.

    The caller closes the streams. Only a process that the kernel itself holds outlives this.
    """
    from subprocess import TimeoutExpired

    for end in (process.terminate, process.kill):
        end()
        with suppress(TimeoutExpired):
            process.wait(grace_s)
            return


def kill_family(leader: int) -> None:
    """Kills a process group, and its leader's descendants, even those in other process groups.

    The leader must not have been waited for: after that, the system may give its pid to another
    process.
    """
    for descendant in descendants(leader):
        kill(descendant)
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def descendants(pid: int) -> "list[psutil.Process]":
    """Returns the children of a process, their children, and so on; none once it has ended."""
    import psutil

    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def kill(process: "psutil.Process") -> None:
    """Kills one process unless it has ended."""
    import psutil

    # psutil compares the start time too, so a new process with the same number is not hit.
    with suppress(psutil.Error):
        process.kill()


def kill_marked(marks: Collection[str], *, variable: str = SERVER_MARK_VARIABLE) -> None:
    """Kills every process but this one that has one of the marks in its environment.

    This finds what a server started even when the server has ended and its children have been
    adopted by init.
    """
    import psutil

    for process in psutil.process_iter():
        # psutil refuses if the process has ended or belongs to another user.
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(variable) in marks:
                process.kill()
