"""llama.cpp's server from the package xllamacpp, with the options of llama-server that are used.

It ends with the process that started it.
"""

import argparse
import importlib
import os
import threading
from typing import Any

from stillroom.processes import end_with_parent

_MOST_S = 24 * 3600.0


def main() -> None:
    """Serves a GGUF file until this process is ended, for a day at most."""
    options = argparse.ArgumentParser()
    options.add_argument("-m", required=True)
    options.add_argument("-c", type=int, required=True)
    options.add_argument("-np", type=int, required=True)
    options.add_argument("--jinja", action="store_true")
    options.add_argument("--host", required=True)
    options.add_argument("--port", type=int, required=True)
    given = options.parse_args()
    end_with_parent(os.getppid())

    # It has no annotations.
    xllamacpp: Any = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = given.m
    params.hostnames, params.port = [given.host], given.port
    params.n_ctx, params.n_parallel, params.use_jinja = given.c, given.np, given.jinja
    threads = os.environ.get("OMP_NUM_THREADS", "")
    # Its threads wait for one another at full speed, so more of them than free cores are slow.
    params.cpuparams.n_threads = int(threads) if threads.isdigit() else os.cpu_count() or 1
    # Caches of earlier prompts may take 8 GB.
    params.warmup, params.cache_ram_mib = False, 0
    server = xllamacpp.Server(params)
    print(f"serving {given.m} at {server.listening_address}", flush=True)  # noqa: T201
    threading.Event().wait(_MOST_S)


if __name__ == "__main__":
    main()
