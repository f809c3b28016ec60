"""Builds the spec of a run on another machine: its files, its outputs, and its budget."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from stillroom.errors import DataError, InputError
from stillroom.lineage import folder_files, manifest_path, pending_manifest_path, read_manifest
from stillroom.remote.bundle.code import add_referenced_files, pinned_packages
from stillroom.remote.bundle.layout import FileLayout
from stillroom.remote.bundle.models import (
    add_card_inputs,
    add_model,
    add_resume_files,
    add_run_records,
    add_tags,
    add_tokenizer_files,
    needs_gguf,
    needs_gguf_for,
)
from stillroom.remote.bundle.needs import Needs
from stillroom.remote.machine import Machine
from stillroom.remote.machines import check_keys_allowed
from stillroom.remote.records import RUN_FILE_PREFIX, JobSpec
from stillroom.rollout.journal.journal import journal_folder
from stillroom.rollout.rescore.rows import scores_path
from stillroom.run_folder import REMOTE_FILE, RunFolder, given_config
from stillroom.secrecy.keys import tool_variables
from stillroom.settings import Workspace
from stillroom.teachers.pricing import LIST_FILE, PRICES_FILE

_HUB_KEYS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


@dataclass(frozen=True, slots=True)
class PackedJob:
    """A job spec, with notes for the user and the run's secrets."""

    spec: JobSpec
    notes: Sequence[str] = ()
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """The values of the secrets by name; the spec has only the names."""

    def after(self, runs: Sequence[str]) -> "PackedJob":
        """Returns a copy that starts once other local runs have ended."""
        return replace(self, spec=msgspec.structs.replace(self.spec, start_after=list(runs)))

    @property
    def run_files(self) -> dict[str, bytes]:
        """The contents of the files to write to the run's folder: the spec, as remote.json."""
        return {REMOTE_FILE: msgspec.json.encode(self.spec)}


def pack(
    workspace: Workspace,
    machine: Machine,
    needs: Needs,
    *,
    budget_usd: float | None = None,
) -> PackedJob:
    """Returns the job spec of a run; file contents are not read yet.

    Raises InputError for a secret that may not be sent to the machine, a package that is not on an
    index, and an output that cannot be downloaded.
    """
    if workspace.runs != workspace.root / "runs":
        raise InputError(
            f"{workspace.root / 'runs'} is a symbolic link, and runs are not downloaded through "
            "links",
            "replace the link with a real folder, or leave where out",
        )
    layout = FileLayout(workspace)
    _add_files(workspace, layout, needs)
    for model in needs.models:
        add_model(workspace, layout, model)
    for name in needs.tokenizers:
        add_tokenizer_files(workspace, layout, name)
    if needs.exported is not None:
        add_card_inputs(workspace, layout, needs.exported)
    if needs.resume is not None:
        add_resume_files(workspace, layout, needs.resume)
    notes = add_referenced_files(workspace, layout, needs.code, needs.servers)
    outputs = [_add_output(workspace, layout, name, needs) for name in needs.outputs]
    for path in needs.reusable:
        layout.add(path, is_optional=True)
    secrets, variables, key_notes = _collect_secrets(workspace, machine, needs)
    if secrets or needs.code:
        layout.add_keys_file()
    is_gguf_read = any(needs_gguf(workspace, model) for model in needs.models) or any(
        needs_gguf_for(workspace, name) for name in needs.tokenizers
    )
    spec = JobSpec(
        machine=machine,
        files=layout.files,
        home_paths=layout.home_paths,
        key_names=list(secrets),
        variables=variables,
        packages=pinned_packages(needs.code),
        extras=[*needs.extras, *(["gguf"] if is_gguf_read else [])],
        outputs=outputs,
        budget_usd=budget_usd,
    )
    return PackedJob(spec, [*notes, *key_notes, *_cost_notes(machine, budget_usd)], secrets)


def _cost_notes(machine: Machine, budget_usd: float | None) -> list[str]:
    """Returns a note on the maximum cost of a run without a budget, if the price is known."""
    if budget_usd is not None or not machine.price_per_hour:
        return []
    max_usd = machine.price_per_hour * machine.max_hours
    limit = f"max_hours: {machine.max_hours:g}, ${machine.price_per_hour:g} an hour"
    return [f"no budget_usd: this run may cost up to ${max_usd:.2f} on {machine.name} ({limit})"]


def _add_files(workspace: Workspace, layout: FileLayout, needs: Needs) -> None:
    """Adds the files that the run reads, with their manifests and tags."""
    for path in needs.files:
        layout.add_all([path])
        layout.add_manifests(path)
        add_tags(workspace, layout, path)
    if needs.config is not None:
        # The run's own copy, so that later edits of config.yml do not affect it.
        layout.add(needs.config, source=f"{RUN_FILE_PREFIX}{given_config(needs.config)}")
    layout.add_all([workspace.root / PRICES_FILE, workspace.root / LIST_FILE])
    for name in needs.records:
        if (run := _run_id_of(workspace, name)) is not None:
            add_run_records(workspace, layout, run)


def _run_id_of(workspace: Workspace, name: str) -> str | None:
    """Returns the run id that a name in a request refers to; None if it refers to a file."""
    path = workspace.path(name)
    run = RunFolder(workspace.runs / name if "/" not in name and not path.exists() else path)
    return run.run_id if run.path.parent == workspace.runs and run.is_run else None


def _add_output(workspace: Workspace, layout: FileLayout, name: str, needs: Needs) -> str:
    """Adds an unfinished output's files; returns its path relative to the workspace."""
    output = workspace.writable(name, label="output")
    if needs.exported is not None and output.is_dir() and any(output.iterdir()):
        raise InputError(
            f"output {workspace.shown(output)!r} has an earlier export, which an export on another "
            "machine cannot replace",
            "give a new folder, or delete the earlier export",
        )
    relative = layout.relative_to_workspace(output)
    if relative is None:
        raise InputError(f"{output} is outside the workspace", "give an output inside it")
    layout.add_alias(name, output)
    for path in _output_files(output, needs):
        layout.add(path)
    return relative


def _output_files(output: Path, needs: Needs) -> list[Path]:
    """Returns the files of an unfinished output and its journal, or of a soft-target store."""
    if output.is_dir():
        row_files = {str(path) for path in needs.files}
        return [path for path in folder_files(output) if _is_store_of(path, row_files)]
    journal = journal_folder(output)
    files = [
        output, manifest_path(output), pending_manifest_path(output), scores_path(output)
    ]  # fmt: skip
    journal_files = sorted(journal.rglob("*")) if journal.is_dir() else []
    return [path for path in (*files, *journal_files) if path.is_file() and path.name != ".lock"]


def _is_store_of(path: Path, row_files: set[str]) -> bool:
    """Returns whether a file belongs to a store of soft targets for one of these row files."""
    # The file itself, or the file whose manifest it is.
    store = path.with_name(path.name.removesuffix(manifest_path(Path("x")).name.removeprefix("x")))
    try:
        manifest = read_manifest(store)
    except DataError:
        return False
    return manifest is not None and any(record.path in row_files for record in manifest.inputs)


def _collect_secrets(
    workspace: Workspace, machine: Machine, needs: Needs
) -> tuple[dict[str, str], list[str], list[str]]:
    """Returns a run's secrets, the names of those in its environment, and notes on omitted keys."""
    api_keys = workspace.read_keys(needs.key_names)
    tools = sorted(tool_variables(workspace.root)) if needs.code or needs.servers else []
    environment_keys = workspace.read_keys([*needs.tracker_keys, *tools])
    check_keys_allowed(workspace, machine, [*api_keys, *environment_keys])
    is_from_hub = any(not model.is_local for model in needs.models)
    hub_keys = workspace.read_keys(_HUB_KEYS) if is_from_hub else {}
    notes = list[str]()
    try:
        check_keys_allowed(workspace, machine, list(hub_keys))
    except InputError as error:
        # Most models of the hub can be downloaded without a token.
        notes.append(f"{', '.join(hub_keys)} is not sent: {error.problem}; {error.fix}")
        hub_keys = {}
    secrets = api_keys | environment_keys | hub_keys
    return secrets, [*environment_keys, *hub_keys], notes
