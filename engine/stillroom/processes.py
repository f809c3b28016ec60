"""Identifies processes, ends them with their parent, and kills them with their descendants.

Many small processes import this module when they start, so its top-level imports are fast.
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
"""The environment variable that marks all processes of one run that has a keeper process."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PARENT_POLL_S = 0.5
_PROC_PIDTBSDINFO = 3
_BSD_INFO_BYTES = 136
_BSD_INFO_START = 120
"""The offset of the start time in macOS's `struct proc_bsdinfo`: two 64-bit numbers, s and µs."""
_START_FIELD = 19
"""The index of `starttime` in /proc/PID/stat, counted from the field after the name."""


def peak_memory_bytes() -> int:
    """Returns the peak memory of this process so far."""
    status = Path("/proc/self/status")
    if status.is_file():
        # Not getrusage, whose peak includes the memory of the parent process.
        lines = status.read_text("ascii").splitlines()
        [peak_line] = [line for line in lines if line.startswith("VmHWM:")]
        return int(peak_line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def process_start(pid: int) -> str | None:
    """Returns a text that, with the pid, identifies a process; None if the process has ended.

    It does not depend on the wall clock: on Linux it consists of the boot id and the ticks from the
    boot to the start of the process, on macOS it is the start time that the kernel recorded.
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
    # The name is in parentheses, and may itself contain spaces and parentheses.
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
    """Makes this process die when its parent, whose pid is `parent`, ends.

    On Linux the kernel kills it, even if a call in this process hangs; elsewhere a thread does.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()
    # The parent may have ended before this call.
    if process_start(parent) is None:
        os.kill(os.getpid(), signal.SIGKILL)


def _watch_parent(parent: int) -> None:
    """Kills this process once its parent is another process than `parent`."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> bool:
    """Makes this process the new parent of orphaned descendants; returns whether it succeeded."""
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0


def user_code_memory_limit() -> int:
    """Returns the memory limit in bytes for a process that runs user code.

    It is half of the machine's memory, but at least 4 GB, so that small machines can load the
    libraries that their tools import.
    """
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return max(4 << 30, pages * page // 2)


def limit_this_process(*, cpu_s: float | None = None, memory_bytes: int | None = None) -> None:
    """Limits the CPU time that this process uses from now on, and its memory.

    Above the CPU limit, the system kills the process; above the memory limit, allocations fail.
    macOS enforces only the CPU limit.
    """
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if cpu_s is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        total_s = int(used.ru_utime + used.ru_stime + cpu_s) + 1
        _set_soft_limit(resource.RLIMIT_CPU, total_s)
    if memory_bytes is not None:
        # Not RLIMIT_AS, which counts the address space that CUDA and thread pools only reserve.
        _set_soft_limit(resource.RLIMIT_DATA, memory_bytes)


def _set_soft_limit(kind: int, limit: int) -> None:
    """Sets a soft limit, not above the hard limit."""
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    # Some systems do not support all limits.
    with suppress(OSError, ValueError):
        resource.setrlimit(kind, (limit, hard))


def end_process(process: "subprocess.Popen[Any]", *, grace_s: float = 5.0) -> None:
    """Terminates a child process, and kills it if it still runs after `grace_s` seconds.

    The caller closes the streams. Only a process that hangs inside the kernel can survive this.
    """
    from subprocess import TimeoutExpired

    for stop in (process.terminate, process.kill):
        stop()
        with suppress(TimeoutExpired):
            process.wait(grace_s)
            return


def kill_family(leader: int) -> None:
    """Kills a process group, and the descendants of its leader that are in other groups.

    The caller must not have reaped the leader yet, since its pid could then be reused.
    """
    for descendant in descendants(leader):
        kill(descendant)
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def descendants(pid: int) -> "list[psutil.Process]":
    """Returns all descendants of a process; an empty list if it has ended."""
    import psutil

    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def kill(process: "psutil.Process") -> None:
    """Kills a process unless it has ended."""
    import psutil

    # psutil also compares the start time, so a new process with the same pid is not killed.
    with suppress(psutil.Error):
        process.kill()


def kill_marked(marks: Collection[str], *, variable: str = SERVER_MARK_VARIABLE) -> None:
    """Kills all other processes that have one of the marks in their environment.

    This also finds the children of a server that has ended, which were adopted by init.
    """
    import psutil

    for process in psutil.process_iter():
        # psutil refuses if the process has ended or belongs to another user.
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(variable) in marks:
                process.kill()
