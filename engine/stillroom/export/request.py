"""The export request, and all checks that do not need to load a model."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from pydantic import Field

from stillroom.errors import InputError, missing_extra
from stillroom.export.folder import TensorFileError, check_output, require_space, stored_bytes
from stillroom.export.gguf.converter import SCRIPT, find_converter
from stillroom.export.gguf.families import ARCHITECTURES, FAMILY_NAMES, text_settings
from stillroom.export.verify_plan import Verification, plan_verification
from stillroom.lineage import ModelRecord
from stillroom.models.gguf.header import read_header
from stillroom.models.precision import Precision
from stillroom.models.resolve import ModelLocation, adapter_base, locate_model
from stillroom.outputs import ReplacingRequest
from stillroom.settings import Workspace
from stillroom.validation import PlacedRequest

ExportFormat = Literal["merged", "text", "adapter", "gguf"]


class ExportModel(PlacedRequest, ReplacingRequest):
    """The request to export a model to a folder that other programs can load."""

    model: Annotated[str, Field(description="Run id or checkpoint folder")]
    output: str
    """The output folder: new, or an earlier export."""
    format: ExportFormat = "merged"
    precision: Literal["bf16", "fp32", "fp16", "q8_0"] | None = None
    """fp16 and q8_0 are for gguf. None means the number format of the model's files (or of the
    adapter's base), except that gguf uses fp16 instead of fp32."""
    llama_cpp: str | None = None
    """For gguf: a checkout of llama.cpp, whose converter is then used.

    Models that Stillroom cannot convert itself need a converter; without this option, one in
    LLAMA_CPP or on the PATH is used.
    """
    licence: Annotated[str | None, Field(description="Id, if the base has none")] = None
    """The id of the base's licence, such as apache-2.0, if its own files do not state it."""
    verify: Annotated[
        int | None,
        Field(ge=2, description="Compare the files with the checkpoint on n prompts"),
    ] = None

    @property
    def number_format(self) -> Precision:
        """The number format of the weights to write; `auto` means that of the files."""
        return self.precision if self.precision in ("bf16", "fp32") else "auto"


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """A validated request: the checkpoint, its base, the output and the converter."""

    checkpoint: ModelLocation
    base: ModelLocation | None
    """The base model of an adapter; None if the checkpoint has all weights."""
    output: Path
    converter: Sequence[str] | None
    """The command of llama.cpp's converter; None if it is not needed."""
    verification: Verification | None = None
    """How the written files are verified; None without verification."""

    @property
    def text_part_of(self) -> ModelRecord | None:
        """The multimodal model whose text part was trained; None if none is recorded."""
        record = self.checkpoint.record
        return record.text_part_of if record is not None else None

    @property
    def inputs(self) -> list[Path]:
        """The model folders that are read, and the files for the verification."""
        return [
            *(self.verification.plan.rollouts.files if self.verification is not None else []),
            *self.checkpoint.inputs,
            *(self.base.inputs if self.base is not None else []),
        ]


def plan_export(workspace: Workspace, request: ExportModel) -> ExportPlan:
    """Returns the validated plan without loading a model. Raises EngineError if it is invalid."""
    if request.where is None and importlib.util.find_spec("transformers") is None:
        raise missing_extra("train", "exporting a model")
    checkpoint = _checkpoint(workspace, request.model)
    base = adapter_base(workspace, checkpoint) if checkpoint.is_adapter else None
    output = workspace.writable(request.output, label="output")
    if request.format == "adapter":
        _check_adapter(request, checkpoint)
    elif base is not None:
        _check_mergeable(checkpoint)
    if request.format == "gguf":
        converter = _converter(workspace, request, base or checkpoint)
    else:
        converter = None
        _check_no_gguf_option(request)
    check_output(output, overwrite=request.overwrite)
    verification = None
    if request.verify is not None:
        verification = plan_verification(
            workspace,
            checkpoint,
            n=request.verify,
            is_gguf=request.format == "gguf",
            checkout=request.llama_cpp,
        )
    plan = ExportPlan(checkpoint, base, output, converter, verification)
    if request.format in ("merged", "gguf"):
        _check_multimodal_model(plan)
    if (num_bytes := _export_bytes(request, plan)) is not None:
        require_space(output, num_bytes)
    return plan


def _converter(
    workspace: Workspace, request: ExportModel, model: ModelLocation
) -> Sequence[str] | None:
    """Returns the command of llama.cpp's converter; None if Stillroom converts the model itself."""
    kind = _model_type(model)
    is_built_in = kind is None or kind in ARCHITECTURES
    if request.llama_cpp is None and is_built_in and importlib.util.find_spec("gguf") is not None:
        return None
    if (converter := find_converter(workspace, request.llama_cpp)) is not None:
        return converter
    if is_built_in:
        raise missing_extra("gguf", "format gguf")
    raise InputError(
        f"Stillroom converts {FAMILY_NAMES} models to GGUF; {model.name!r} is of type {kind!r}, "
        f"and llama.cpp's {SCRIPT} is neither on the PATH nor in LLAMA_CPP",
        "clone ggml-org/llama.cpp and set llama_cpp to its folder, or use format merged",
    )


def _model_type(model: ModelLocation) -> str | None:
    """Returns the model type of a model folder's text part; None for a hub id or a GGUF file.

    Stillroom reads only GGUF files of architectures that it also writes.
    """
    if not model.is_local or model.is_gguf:
        return None
    config = msgspec.json.decode((model.path / "config.json").read_bytes())
    return text_settings(config).get("model_type")


def _check_no_gguf_option(request: ExportModel) -> None:
    if request.llama_cpp is not None:
        raise InputError("llama_cpp needs format gguf", "leave llama_cpp out, or set format gguf")
    if request.precision in ("fp16", "q8_0"):
        raise InputError(
            f"precision {request.precision} needs format gguf",
            "set format gguf, or use precision bf16 or fp32",
        )


def _checkpoint(workspace: Workspace, model: str) -> ModelLocation:
    """Returns the checkpoint to export. Raises InputError for a model on the hub."""
    location = locate_model(workspace, model)
    if location.is_local:
        return location
    raise InputError(
        f"model {model!r} is on the model hub and was not trained here",
        "give the id of a training run (list_runs), or the folder of a checkpoint",
    )


def _check_adapter(request: ExportModel, checkpoint: ModelLocation) -> None:
    if not checkpoint.is_adapter:
        raise InputError(
            f"{request.model!r} has no adapter: all its weights were trained (qlora_rank: 0)",
            "use format merged, which writes all weights",
        )
    if request.precision is not None:
        raise InputError(
            "precision does not apply to format adapter: an adapter is written as it was trained",
            "leave precision out",
        )


def _check_mergeable(checkpoint: ModelLocation) -> None:
    config = msgspec.json.decode((checkpoint.path / "adapter_config.json").read_bytes())
    kind = config.get("peft_type")
    if kind != "LORA":
        raise InputError(
            f"{checkpoint.name!r} is an adapter of type {kind}, which cannot be merged",
            "use format adapter",
        )


def _check_multimodal_model(plan: ExportPlan) -> None:
    """Raises InputError if the multimodal model whose text part was trained no longer exists."""
    model = plan.text_part_of
    if model is None or model.folder is None or model.folder.is_dir():
        return
    raise InputError(
        f"the multimodal model whose text part was trained no longer exists: {model.location}",
        "restore it, or export only the text part with format text",
    )


def _weight_bytes(files: Path, precision: Precision) -> int:
    """Returns the size of the weights in a folder or GGUF file when written in a precision."""
    if files.is_file():
        return read_header(files).loaded_bytes(bits=32 if precision == "fp32" else None)
    return stored_bytes(files, precision)


def _export_bytes(request: ExportModel, plan: ExportPlan) -> int | None:
    """Returns the maximum size of the export in bytes; None if the base is only on the hub."""
    source = plan.checkpoint if request.format == "adapter" else plan.base or plan.checkpoint
    folders = [source.path] if source.is_local else []
    if (multimodal := plan.text_part_of) is not None and plan.base is None:
        # The untrained parts of the multimodal model are written too.
        folders += [
            folder for folder in (multimodal.folder,) if folder is not None and folder.is_dir()
        ]
    if not folders:
        return None
    try:
        weights = sum(_weight_bytes(folder, request.number_format) for folder in folders)
    except TensorFileError as error:
        raise InputError(str(error), "use a complete checkpoint of safetensors files") from error
    # The merged model, from which the GGUF file is converted, needs space at the same time.
    return 2 * weights if request.format == "gguf" else weights
