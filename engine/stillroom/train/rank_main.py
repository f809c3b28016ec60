"""The program of one training process (rank).

A launcher starts `python -m stillroom.train.rank_main FOLDER`; the environment variable RANK has
the number of the process.
"""

import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
from accelerate import PartialState

from stillroom import __version__
from stillroom.errors import EngineError, RunCancelledError, RunError, leaf_of
from stillroom.run_folder import RunFolder
from stillroom.secrecy.environments import shared_secrets
from stillroom.secrecy.redaction import RedactedStream, Redactor
from stillroom.settings import Workspace
from stillroom.train.config.request import StartTraining, plan_request
from stillroom.train.distributed.rank_folder import (
    RankEnd,
    RankFailure,
    RankFiles,
    RankReporter,
    watch_owner,
)
from stillroom.train.loop.session import TrainResult
from stillroom.train.run import train_in_process
from stillroom.train.student.collective import WAIT_S, Collective


def main() -> int:
    """Runs the rank folder's job as one rank and returns the exit code."""
    files, rank = RankFiles(Path(sys.argv[1])), int(os.environ["RANK"])
    redirect_output(files.log_file(rank), Redactor(shared_secrets().values()))
    watch_owner(files, files.read_job().owner)
    is_cuda = torch.cuda.is_available()
    state = PartialState(cpu=not is_cuda, timeout=timedelta(seconds=WAIT_S))
    is_sharded = files.read_job().is_sharded
    peers = Collective(rank, state.num_processes, str(state.device), is_sharded=is_sharded)
    end = train_as_rank(files, peers)
    return 0 if end.failure is None else 1


def train_as_rank(files: RankFiles, peers: Collective) -> RankEnd:
    """Trains as this rank; records and returns how it ended."""
    files.record_start(peers.rank, peers.size)
    try:
        result = _train(files, peers)
        end = RankEnd(time=time.time(), result=msgspec.to_builtins(result))
    except RunCancelledError:
        end = RankEnd(time=time.time(), is_cancelled=True)
    # Any exception is recorded, so that the run can report it.
    except BaseException as error:
        traceback.print_exc()
        end = RankEnd(time=time.time(), failure=_failure_of(error))
    files.record_end(peers.rank, end)
    return end


def _train(files: RankFiles, peers: Collective) -> TrainResult:
    job = files.read_job()
    if job.version != __version__:
        raise RunError(
            f"rank {peers.rank} has stillroom {__version__}, but the run was started with "
            f"{job.version}",
            "install the same version on all machines",
        )
    workspace = Workspace(Path(job.workspace), shared_secrets())
    request = StartTraining.model_validate(job.request)
    return train_in_process(
        workspace,
        request,
        plan_request(workspace, request, run=RunFolder(Path(job.run))),
        folder=Path(job.run),
        reporter=RankReporter(files, is_first=peers.is_first),
        peers=peers,
    )


def _failure_of(error: BaseException) -> RankFailure:
    """Returns the failure to record for an exception; of a group, the first one."""
    leaf = leaf_of(error)
    kind = type(leaf).__name__
    if isinstance(leaf, EngineError):
        return RankFailure(kind=kind, problem=leaf.problem, fix=leaf.fix)
    number = leaf.errno if isinstance(leaf, OSError) else None
    text = str(leaf).strip()
    if isinstance(leaf, MemoryError):
        text = f"out of memory: {text}"
    return RankFailure(kind=kind, problem=text or kind, errno=number)


_CHUNK = 1 << 16


def redirect_output(log: Path, redactor: Redactor) -> None:
    """Redirects stdout and stderr, also of C libraries, to a log with known secrets redacted.

    A separate process writes it, so that the last output of a killed process is in the log. It
    exits once nothing holds the two streams open.
    """
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        try:
            os.close(write_end)
            _copy(read_end, output, redactor)
        finally:
            os._exit(0)  # this process must never train
    os.close(read_end)
    os.close(output)
    os.dup2(write_end, sys.stdout.fileno())
    os.dup2(write_end, sys.stderr.fileno())
    os.close(write_end)


def _copy(pipe: int, output: int, redactor: Redactor) -> None:
    """Copies a pipe to the log, with secrets redacted, until all of its writers are closed."""
    # A signal stops the training process; this one still has to write its last output.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        os.close(stream.fileno())
    clean = RedactedStream(redactor, lambda data: _write_all(output, data))
    while data := os.read(pipe, _CHUNK):
        clean.write(data)
    clean.flush()


def _write_all(output: int, data: bytes) -> None:
    remaining = memoryview(data)
    # Output that a full disk rejects is lost: training must not stop because of its log.
    with suppress(OSError):
        while remaining:
            remaining = remaining[os.write(output, remaining) :]


if __name__ == "__main__":
    sys.exit(main())
