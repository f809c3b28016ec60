"""Starts the processes of a run as `accelerate launch` does, on this machine or on several."""

import logging
import os
import shlex
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
import yaml
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from stillroom.files import write_atomic
from stillroom.train.config.sections import LauncherSection
from stillroom.train.distributed.rank_folder import RANK_MODULE, RankFiles, RanksFailedError

_CONFIG = "accelerate.yaml"


def run_on_accelerate(
    files: RankFiles, section: LauncherSection, *, size: int, note: Callable[[str], None]
) -> None:
    """Starts this machine's processes and waits for them; other machines are started by hand.

    The commands to start on the other machines are passed to `note`.
    Raises RanksFailedError if a process fails.
    """
    config = files.folder / _CONFIG
    text = yaml.safe_dump(accelerate_config(section, size=size), sort_keys=False)
    write_atomic(config, text.encode())
    arguments = ["--config_file", str(config), "-m", RANK_MODULE, str(files.folder)]
    command = shlex.join(["accelerate", "launch", *arguments])
    note(f"training processes started with: {command}")
    for machine in range(1, section.num_machines):
        remote = shlex.join(["accelerate", "launch", "--machine_rank", str(machine), *arguments])
        note(f"waiting for machine {machine}; run this command on it: {remote}")
    threads = os.environ.get("OMP_NUM_THREADS") or _threads(size // section.num_machines)
    _launch(["--num_cpu_threads_per_process", str(threads), *arguments])


def accelerate_config(section: LauncherSection, *, size: int) -> dict[str, Any]:
    """Returns the content of accelerate's configuration file."""
    host, _, port = (section.main_address or "127.0.0.1:0").rpartition(":")
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        # With MULTI_CPU accelerate would need mpirun. MULTI_GPU starts the processes itself, even
        # without a GPU; PartialState then uses gloo.
        "distributed_type": "FSDP" if section.strategy == "fsdp2" else "MULTI_GPU",
        "num_machines": section.num_machines,
        "num_processes": size,
        "machine_rank": 0,
        "main_process_ip": host,
        "main_process_port": int(port),
        "rdzv_backend": "static",
        "same_network": True,
        "mixed_precision": "no",
        "use_cpu": False,
        "main_training_function": "main",
    }
    if section.strategy == "fsdp2":
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "FULL_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False,
        }
    return config


def _threads(local: int) -> int:
    """Returns the number of CPU threads for each of `local` processes; with a GPU one is enough."""
    return 1 if torch.cuda.is_available() else max(1, (os.cpu_count() or 1) // local)


def _launch(arguments: list[str]) -> None:
    """Runs `accelerate launch` until it exits. Raises RanksFailedError if a process fails.

    It runs in a thread, since in the main thread it would replace the signal handlers.
    """
    parsed = launch_command_parser().parse_args(arguments)
    # torch warns that signals do not reach a thread; ranks watch for cancellation themselves.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.ERROR)
    raised: list[BaseException] = []

    def launch() -> None:
        try:
            launch_command(parsed)
        # Re-raised below, in the waiting thread.
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=launch, daemon=True)
    thread.start()
    thread.join()  # no limit: training may take any time
    if not raised:
        return
    if isinstance(raised[0], ChildFailedError):
        raise RanksFailedError(_exit_reasons(raised[0])) from raised[0]
    raise raised[0]


def _exit_reasons(error: ChildFailedError) -> dict[int, str]:
    """Returns how each failed process exited, by rank, those killed by a signal first.

    SIGTERM is ignored: accelerate sends it to the others once one has failed.
    """
    reasons: dict[int, str] = {}
    for rank, failure in sorted(error.failures.items(), key=lambda item: item[1].exitcode):
        if failure.exitcode == -signal.SIGTERM:
            continue
        if failure.exitcode < 0:
            reasons[rank] = f"was killed by {signal.Signals(-failure.exitcode).name}"
        else:
            reasons[rank] = f"exited with code {failure.exitcode}"
    return reasons
