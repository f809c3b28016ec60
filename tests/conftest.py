"""Fixtures that every test may use."""

import gc
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported: the machine's cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# peft loads bitsandbytes, and that torch's compiler, which takes longer than most runs here.
# Nothing of ours is compiled.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# No test depends on which keys the developer allows where.
os.environ["STILLROOM_CONFIG"] = "/nonexistent/stillroom"

import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files anew, for review"
    )
    parser.addoption(
        "--quick",
        action="store_true",
        help="pass over tests that load a heavy library, open a browser or start a process",
    )


def pytest_configure(config):
    # With xdist its workers refuse, and the process that starts them does not.
    starts_workers = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not starts_workers:
        # Libraries stay to the end. Looking through all of their objects time and again would
        # take a fifth of the time in which tests are collected, and a tenth of the rest.
        gc.disable()
    if config.getoption("quick") and not starts_workers:
        from fakes.quick import QuickOnly

        config.pluginmanager.register(QuickOnly())
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        # A machine that has a GPU tests the same as one that has none.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # peft asks transformers for it under its old name.
    config.addinivalue_line(
        "filterwarnings", "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config, specs):
    """Forks the workers for all tests from a process that has loaded what nearly all of them need.

    Loading it takes most of the time in which tests are collected, and each would do so by itself.
    """
    is_all = config.args_source is not pytest.Config.ArgsSource.ARGS
    if is_all and len(specs) > 1 and sys.platform == "linux" and not config.getoption("quick"):
        from fakes.warm_python import open_warm_python, worker_program

        client = open_warm_python(config._tmp_path_factory.getbasetemp(), until=os.getpid())
        for spec in specs:
            spec.python = str(worker_program(client))


def pytest_collectstart(collector):
    """Has hypothesis try the same examples in each run, however long each takes."""
    is_module = isinstance(collector, pytest.Module)
    if is_module and "hypothesis" in collector.path.read_text(encoding="utf-8"):
        from hypothesis import settings

        settings.load_profile("ci")


def pytest_collection_finish():
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session):
    if "hypothesis" not in sys.modules:
        # It would be imported, in more than a second, only to say that it has nothing to say.
        session.config.pluginmanager.unregister(name="hypothesispytest")


@pytest.fixture(scope="session", autouse=True)
def quick_disk() -> Iterator[None]:
    """Has nothing in this process wait for the disk, as no test cuts the power."""
    from fakes.warm_python import wait_for_no_disk

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", wait_for_no_disk)
        yield


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Begins each test with the same random numbers, whatever ran before it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is the same one in all processes of the tests."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def tiny_models(shared_folder: Path):
    """Tiny models with random weights, each built and saved once."""
    from fakes.tiny_models import TinyModels

    folder = shared_folder / "models"
    folder.mkdir(exist_ok=True)
    return TinyModels(folder)


@pytest.fixture(scope="session")
def warm_program(shared_folder: Path) -> Path:
    """The program of `warm_python`, of which all processes of the tests have the same one."""
    from fakes.warm_python import open_warm_python

    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    return open_warm_python(shared_folder, until=os.getppid() if is_worker else os.getpid())


@pytest.fixture
def warm_python(
    warm_program: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[None]:
    """Has runs begin in processes that have loaded torch beforehand; see fakes/warm_python.py.

    The processes that a failed test leaves in its folder are ended.
    """
    from fakes.warm_python import kill_processes_in

    monkeypatch.setattr(sys, "executable", str(warm_program))
    yield
    kill_processes_in(tmp_path)
