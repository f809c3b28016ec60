"""Runs llama.cpp's server from the package xllamacpp, with the few llama-server options used here.

It ends with the process that started it.
"""

import argparse
import importlib
import os
import threading
from typing import Any

from stillroom.processes import end_with_parent

_MAX_SERVE_S = 24 * 3600.0


def main() -> None:
    """Serves a GGUF file until this process is ended, for a day at most."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", required=True)
    parser.add_argument("-c", type=int, required=True)
    parser.add_argument("-np", type=int, required=True)
    parser.add_argument("--jinja", action="store_true")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    end_with_parent(os.getppid())

    # xllamacpp ships no type annotations.
    xllamacpp: Any = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = options.m
    params.hostnames, params.port = [options.host], options.port
    params.n_ctx, params.n_parallel, params.use_jinja = options.c, options.np, options.jinja
    threads = os.environ.get("OMP_NUM_THREADS", "")
    # llama.cpp's threads busy-wait (spin), so using more threads than free cores is slow.
    params.cpuparams.n_threads = int(threads) if threads.isdigit() else os.cpu_count() or 1
    # By default, the cache of earlier prompts may grow to 8 GB.
    params.warmup, params.cache_ram_mib = False, 0
    server = xllamacpp.Server(params)
    print(f"serving {options.m} at {server.listening_address}", flush=True)  # noqa: T201
    threading.Event().wait(_MAX_SERVE_S)


if __name__ == "__main__":
    main()
