"""The connection to a Ray cluster, either made for one run or already open in the process."""

import importlib
import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from stillroom.errors import RunError, missing_extra

_OBJECT_STORE_BYTES = 100 << 20
"""The size of the object store in bytes; little is needed, since rows are passed in files."""


@contextmanager
def ray_cluster(
    address: str | None, *, num_cpus: int | None = None, key: str = "ray_address"
) -> Generator[Any]:
    """Yields the module `ray`, connected to a cluster; an open connection is reused and stays open.

    `num_cpus` is for a cluster that is started on this machine (`local`); None takes all cores.
    `key` names the option that sets the address, for errors.
    Raises MissingExtraError without Ray, and RunError if no cluster answers.
    """
    with _restore_sigterm_handler():
        try:
            ray: Any = importlib.import_module("ray")
        except ModuleNotFoundError as error:
            raise missing_extra("ray", "splitting work over Ray") from error
        opens_connection = not ray.is_initialized()
        try:
            if opens_connection:
                _connect(ray, address, num_cpus)
        except (OSError, RuntimeError, ValueError) as error:
            raise RunError(
                f"no Ray cluster answers at {address!r}: {str(error)[:300]}",
                f"start a cluster with `ray start --head`, or set {key} to local to start one on "
                "this machine",
            ) from error
    try:
        yield ray
    finally:
        if opens_connection:
            ray.shutdown()


def _connect(ray: Any, address: str | None, num_cpus: int | None) -> None:
    """Connects to a cluster; the address `local` starts one on this machine."""
    if address != "local":
        ray.init(address=address)
        return
    # By default Ray sends usage statistics to its developers, to which the user has not agreed.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
    )


@contextmanager
def _restore_sigterm_handler() -> Generator[None]:
    """Restores this process's SIGTERM handler, since Ray sets one that ends the process."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)
