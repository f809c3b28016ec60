"""export_model: writes the export folder with weights, model card and hashes."""

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from stillroom import __version__
from stillroom.export.card import CARD, CardFacts, render_card
from stillroom.export.folder import MANIFEST, ExportManifest, export_folder, record_files
from stillroom.export.gguf.converter import SCRIPT, convert
from stillroom.export.gguf.write import check_convertible, write_gguf
from stillroom.export.history import History, read_history
from stillroom.export.multimodal import find_multimodal_base, is_multimodal
from stillroom.export.provenance import Licence, licence_of, public_name
from stillroom.export.request import ExportModel, ExportPlan, plan_export
from stillroom.export.serving import (
    TOOLS,
    ReadBack,
    ServingFacts,
    UsageExample,
    VerifiedAccuracy,
    WrittenModel,
)
from stillroom.export.weights import write_adapter, write_merged
from stillroom.files import write_atomic, write_json
from stillroom.home_paths import restore_home_paths
from stillroom.lineage import FileRecord, combine_records, now, record_file, write_manifest
from stillroom.models.gguf.folder import pretrained_path
from stillroom.models.resolve import identify
from stillroom.reporting import Reporter, stop_if_cancelled
from stillroom.run_folder import RunFolder
from stillroom.settings import Workspace

LOG = "llama_cpp.txt"
_NOT_LOADED = (
    "the GGUF file itself was not loaded, only the weights it was made from: test it before use"
)


class ExportResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of export_model."""

    output: str
    format: str
    checkpoint: str
    base_model: str
    precision: str
    parameters: int | None
    files: int
    bytes: int
    card: str
    licence: str | None
    """The base model's licence; None if neither its files nor the request state it."""
    synthetic: bool
    teachers: list[str]
    evaluations: int
    """The number of evaluations in the model card."""
    read_back: ReadBack | None
    other_parts: str | None
    """What was done with the untrained parts of a multimodal model; None if there are none."""
    serve: str | None
    """The command that serves the export."""
    warnings: list[str]
    seconds: float
    """The seconds of the export itself, without installation and transfers on another machine."""
    verified: list[VerifiedAccuracy] = []
    """The accuracy of the written files with each program; empty without verify."""


@dataclass(frozen=True, slots=True)
class _Export:
    """The plan of the export, and the facts about the model before it is loaded."""

    workspace: Workspace
    request: ExportModel
    plan: ExportPlan
    history: History
    licence: Licence | None

    @property
    def source(self) -> str:
        """The path of the checkpoint for display."""
        return self.workspace.shown(self.plan.checkpoint.path)


def export_model(
    workspace: Workspace, request: ExportModel, *, folder: Path, reporter: Reporter
) -> ExportResult:
    """Writes the export; its folder appears only once it is complete."""
    started = time.monotonic()
    plan = plan_export(workspace, request)
    history = read_history(workspace, plan.checkpoint, plan.base)
    licence = licence_of(history.base, _stated_licence(request, history))
    export = _Export(workspace, request, plan, history, licence)
    with export_folder(plan.output, run=folder, overwrite=request.overwrite) as target:
        written, gguf_file = _write(export, target, folder, reporter)
        RunFolder(folder).check_inputs()
        served = _serving_facts(export, written)
        verified = []
        if plan.verification is not None:
            # Imported here, because it loads the code for rollouts.
            from stillroom.export.verify import WrittenFiles, verify_files

            target_facts = replace(served, path=str(target), base=_base_path(plan, served))
            files = WrittenFiles(target, gguf_file, target_facts, folder, written.max_context)
            verified = verify_files(workspace, plan.verification, files, reporter)
        conversation, stage_with_tools = history.conversation, history.stage_with_tools
        if stage_with_tools is not None and stage_with_tools.conversation is not None:
            write_json(target / TOOLS, stage_with_tools.conversation.tool_schemas)
        usage = UsageExample(
            request.format,
            plan.output.name,
            served,
            gguf_file,
            system=conversation.system if conversation is not None else None,
            has_tools=stage_with_tools is not None,
            is_multimodal=written.is_multimodal,
        )
        facts = CardFacts(history, export.licence, usage, export.source, written, verified)
        write_atomic(target / CARD, render_card(facts).encode("utf-8", errors="replace"))
        stop_if_cancelled(reporter)
        restore_home_paths(target)
        manifest = _manifest(export, written, record_files(target))
        write_json(target / MANIFEST, manifest)
        _write_lineage(workspace, plan, target, manifest, run_id=folder.name)
    local_facts = replace(served, path=workspace.shown(plan.output), base=_base_path(plan, served))
    seconds = round(time.monotonic() - started, 3)
    result = _result(export, written, manifest, replace(usage, served=local_facts), seconds=seconds)
    if not verified:
        return result
    warnings = [warning for warning in result.warnings if warning != _NOT_LOADED]
    return msgspec.structs.replace(result, verified=verified, warnings=warnings)


def _stated_licence(request: ExportModel, history: History) -> Licence | None:
    """Returns the licence that the request, or a training's config.yml, states, if any."""
    if request.licence is not None:
        return Licence(request.licence, source="the user who exported it")
    stated = history.stated_licence
    return Licence(stated, source="the user's config.yml") if stated is not None else None


def _result(
    export: _Export,
    written: WrittenModel,
    manifest: ExportManifest,
    usage: UsageExample,
    *,
    seconds: float,
) -> ExportResult:
    history, licence = export.history, export.licence
    return ExportResult(
        output=usage.served.path,
        format=usage.format,
        checkpoint=export.source,
        base_model=history.base_name,
        precision=written.precision,
        parameters=written.parameters,
        files=len(manifest.files),
        bytes=sum(record.num_bytes for record in manifest.files),
        card=f"{usage.served.path}/{CARD}",
        licence=licence.id if licence else None,
        synthetic=history.is_synthetic,
        teachers=history.teachers,
        evaluations=len(history.evaluations),
        read_back=written.read_back,
        other_parts=written.other_parts,
        serve=usage.command,
        warnings=list(_warnings(export.plan, history, licence, usage, written)),
        seconds=seconds,
    )


def _write(
    export: _Export, target: Path, run: Path, reporter: Reporter
) -> tuple[WrittenModel, str | None]:
    """Writes the model's files; returns their facts, and the name of the GGUF file if any."""
    plan, request = export.plan, export.request
    precision = request.number_format
    if request.format == "adapter" and plan.base is not None:
        return _with_parts_note(export, write_adapter(plan.checkpoint, plan.base, target)), None
    if request.format == "gguf":
        return _write_gguf(export, target, run, reporter)
    multimodal = find_multimodal_base(export.workspace, plan) if request.format != "text" else None
    written = write_merged(
        plan, target, precision=precision, reporter=reporter, multimodal=multimodal
    )
    return _with_parts_note(export, written), None


def _write_gguf(
    export: _Export, target: Path, run: Path, reporter: Reporter
) -> tuple[WrittenModel, str | None]:
    """Writes the GGUF file of the merged model; returns its facts and its name."""
    plan, request = export.plan, export.request
    multimodal = find_multimodal_base(export.workspace, plan)
    if plan.converter is None:
        check_convertible(plan.base or plan.checkpoint, plan.checkpoint)
    # The converter names the model after its folder.
    merged = target / plan.output.name
    written = write_merged(
        plan,
        merged,
        precision=request.number_format,
        reporter=reporter,
        multimodal=multimodal if plan.converter is not None else None,
    )
    precision = request.precision or ("bf16" if written.precision == "bf16" else "fp16")
    reporter.note(f"converting to GGUF ({precision})")
    output = target / f"{plan.output.name}.gguf"
    if plan.converter is None:
        name = plan.output.name
        write_gguf(merged, output, name=name, precision=precision, reporter=reporter)
    else:
        log = run / LOG
        convert(plan.converter, merged, output, precision=precision, log=log, reporter=reporter)
    shutil.rmtree(merged)
    written = replace(written, precision=precision, is_multimodal=multimodal is not None)
    return _with_parts_note(export, written), output.name


def _with_parts_note(export: _Export, written: WrittenModel) -> WrittenModel:
    """Returns `written` with a note on a multimodal model's parts that were not trained."""
    plan = export.plan
    record = plan.text_part_of
    base = plan.base or plan.checkpoint
    location = record.location if record is not None else base.location
    name = public_name(export.workspace, location)
    match export.request.format:
        case "adapter" if written.is_multimodal:
            note = f"the adapter changes only the text part of {name}"
        case "gguf" if written.is_multimodal:
            note = (
                f"the GGUF file contains the text part of {name}; for the unchanged vision part, "
                f"run llama.cpp's {SCRIPT} with --mmproj on {name}"
            )
        case "text" if record is not None or is_multimodal(base):
            note = f"left out: this is only the text part of {name}"
        case _:
            return written
    return replace(written, other_parts=note)


def _serving_facts(export: _Export, written: WrittenModel) -> ServingFacts:
    """Returns the facts for the serving command, with paths relative to the export's parent."""
    plan, stages = export.plan, export.history.stages
    lengths = [written.max_context, stages[-1].max_length if stages else None]
    # Merged weights do not need the base.
    base = plan.base if written.read_back is None else None
    return ServingFacts(
        path=f"./{plan.output.name}",
        name=plan.output.name,
        precision=written.precision,
        max_length=min((length for length in lengths if length is not None), default=None),
        tool_parser=written.tool_parser,
        base=public_name(export.workspace, base.location) if base is not None else None,
        rank=_adapter_rank(plan),
    )


def _base_path(plan: ExportPlan, served: ServingFacts) -> str | None:
    """Returns the location of an adapter's base on this machine."""
    return pretrained_path(plan.base) if plan.base is not None and served.base is not None else None


def _adapter_rank(plan: ExportPlan) -> int | None:
    """Returns the highest rank of an adapter; None without an adapter."""
    if plan.base is None:
        return None
    path = plan.checkpoint.path / "adapter_config.json"
    config = msgspec.json.decode(path.read_bytes())
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    return max((rank for rank in ranks if isinstance(rank, int)), default=None)


def _manifest(export: _Export, written: WrittenModel, files: list[FileRecord]) -> ExportManifest:
    record = export.plan.checkpoint.record
    return ExportManifest(
        format=export.request.format,
        request=export.request.model_dump(mode="json"),
        run_id=record.run_id if record else None,
        method=record.method if record else None,
        step=record.step if record else None,
        base_model=export.history.base_name,
        precision=written.precision,
        files=files,
        stillroom_version=__version__,
        created_at=now(),
    )


def _write_lineage(
    workspace: Workspace, plan: ExportPlan, target: Path, manifest: ExportManifest, *, run_id: str
) -> None:
    export_record = msgspec.structs.replace(record_file(target / MANIFEST), path=MANIFEST)
    files = sorted([*manifest.files, export_record], key=lambda record: Path(record.path))
    write_manifest(
        target,
        written=combine_records(plan.output, files),
        operation="export_model",
        inputs=[identify(workspace, plan.checkpoint, role="checkpoint")],
        request=manifest.request,
        counts={"files": len(files)},
        run_id=run_id,
    )


def _warnings(
    plan: ExportPlan,
    history: History,
    licence: Licence | None,
    usage: UsageExample,
    written: WrittenModel,
) -> Iterator[str]:
    if licence is None:
        yield (
            f"the licence of {history.base_name} is unknown: look it up before publishing, "
            "then export again with licence=<its id>, or train with model.license in config.yml"
        )
    stated = history.stated_licence
    if licence is not None and stated not in (None, licence.id):
        yield (
            f"model.license in config.yml says {stated}, but {licence.source} says {licence.id}, "
            "which the card shows"
        )
    if not history.evaluations:
        yield "this checkpoint was not evaluated, so the model card has no evaluation"
    if written.read_back is not None and usage.format == "gguf":
        yield _NOT_LOADED
    if usage.format == "adapter" and plan.base is not None and plan.base.is_local:
        base = pretrained_path(plan.base)
        yield f"the adapter needs its base model at {base}; an export with format=merged does not"
    if usage.command is None:
        yield "vLLM supports adapters up to rank 512: export with format merged to serve it"
