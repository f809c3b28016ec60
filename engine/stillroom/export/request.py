"""The export request, and every check that needs no model to be loaded."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from pydantic import Field

from stillroom.errors import InputError, missing_extra
from stillroom.export.folder import TensorFileError, check_output, require_space, stored_bytes
from stillroom.export.gguf import find_converter
from stillroom.export.verify_plan import Verification, plan_verification
from stillroom.lineage import ModelRecord
from stillroom.models.precision import Precision
from stillroom.models.resolve import ModelLocation, adapter_base, locate_model
from stillroom.outputs import ReplacingRequest
from stillroom.settings import Workspace
from stillroom.validation import PlacedRequest

ExportFormat = Literal["merged", "text", "adapter", "gguf"]


class ExportModel(PlacedRequest, ReplacingRequest):
    """Ask for a model folder that other programs load."""

    model: Annotated[str, Field(description="Run id or checkpoint folder")]
    output: str
    """The output folder: new, or an earlier export."""
    format: ExportFormat = "merged"
    precision: Literal["bf16", "fp32"] | None = None
    """None: the number format of the files of the model (or of the adapter's base)."""
    llama_cpp: str | None = None
    """gguf: a checkout of llama.cpp; otherwise LLAMA_CPP and the PATH are looked at."""
    licence: Annotated[str | None, Field(description="If unstated")] = None
    """The id of the base's licence, such as apache-2.0, where its own files name none."""
    verify: Annotated[
        int | None,
        Field(ge=2, description="Done only if the files answer so many prompts as well"),
    ] = None

    @property
    def number_format(self) -> Precision:
        """The number format to write; `auto` is that of the files."""
        return self.precision or "auto"


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """A checked request: the checkpoint, its base, the output and the converter."""

    checkpoint: ModelLocation
    base: ModelLocation | None
    """The base model of an adapter; None if the checkpoint has all weights."""
    output: Path
    converter: Sequence[str] | None
    """The command of llama.cpp's converter, for format gguf."""
    verification: Verification | None = None
    """How the written files are verified; None if they are not."""

    @property
    def text_part_of(self) -> ModelRecord | None:
        """The multimodal model whose text part the checkpoint is, as it was in training."""
        record = self.checkpoint.record
        return record.text_part_of if record is not None else None

    @property
    def inputs(self) -> list[Path]:
        """The folders of the models that are read, and the files to verify with."""
        return [
            *(self.verification.plan.rollouts.files if self.verification is not None else []),
            *self.checkpoint.inputs,
            *(self.base.inputs if self.base is not None else []),
        ]


def plan_export(workspace: Workspace, request: ExportModel) -> ExportPlan:
    """Returns the checked plan, loading no model. Raises an EngineError that says what is wrong."""
    if request.where is None and importlib.util.find_spec("transformers") is None:
        raise missing_extra("train", "exporting a model")
    checkpoint = _checkpoint(workspace, request.model)
    base = adapter_base(workspace, checkpoint) if checkpoint.is_adapter else None
    output = workspace.writable(request.output, label="output")
    converter = None
    if request.format == "adapter":
        _check_adapter(request, checkpoint)
    elif base is not None:
        _check_mergeable(checkpoint)
    if request.format == "gguf":
        converter = find_converter(workspace, request.llama_cpp)
    elif request.llama_cpp is not None:
        raise InputError("llama_cpp is for format gguf", "leave llama_cpp out, or set format gguf")
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
        _check_whole(plan)
    if (num_bytes := _size(request, plan)) is not None:
        require_space(output, num_bytes)
    return plan


def _checkpoint(workspace: Workspace, model: str) -> ModelLocation:
    location = locate_model(workspace, model)
    if location.is_local:
        return location
    raise InputError(
        f"model {model!r} is on the model hub, and nothing of it was trained here",
        "give the id of a training run (list_runs), or a checkpoint's folder",
    )


def _check_adapter(request: ExportModel, checkpoint: ModelLocation) -> None:
    if not checkpoint.is_adapter:
        raise InputError(
            f"{request.model!r} has no adapter: all its weights were trained (qlora_rank: 0)",
            "use format merged, which writes all weights",
        )
    if request.precision is not None:
        raise InputError(
            "precision is for formats merged and gguf; an adapter is written as it was trained",
            "leave precision out",
        )


def _check_mergeable(checkpoint: ModelLocation) -> None:
    config = msgspec.json.decode((checkpoint.folder / "adapter_config.json").read_bytes())
    kind = config.get("peft_type")
    if kind != "LORA":
        raise InputError(
            f"{checkpoint.name!r} is an adapter of type {kind}, which cannot be merged",
            "use format adapter",
        )


def _check_whole(plan: ExportPlan) -> None:
    """Raises InputError if the multimodal model whose text part was trained is gone."""
    whole = plan.text_part_of
    if whole is None or whole.folder is None or whole.folder.is_dir():
        return
    raise InputError(
        f"the multimodal model whose text part was trained is gone: {whole.location}",
        "put it back, or export the text part alone: format text",
    )


def _size(request: ExportModel, plan: ExportPlan) -> int | None:
    """Returns the most bytes the export may take; None if the base is still on the hub."""
    source = plan.checkpoint if request.format == "adapter" else plan.base or plan.checkpoint
    folders = [source.folder] if source.is_local else []
    if (whole := plan.text_part_of) is not None and plan.base is None:
        # The other parts are written with the trained weights.
        folders += [folder for folder in (whole.folder,) if folder is not None and folder.is_dir()]
    if not folders:
        return None
    try:
        weights = sum(stored_bytes(folder, request.number_format) for folder in folders)
    except TensorFileError as error:
        raise InputError(str(error), "use a complete checkpoint of safetensors files") from error
    # A GGUF file is made from the whole model, which is stored next to it for a while.
    return 2 * weights if request.format == "gguf" else weights
