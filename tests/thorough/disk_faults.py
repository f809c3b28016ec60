"""A full disk, a failing disk and no memory at each write of an operation: what is on the disk, and does it go on? disk_faults.py [--points 6] [--all]

Each operation (rollouts, the four of curation, training with checkpoints, export) runs in a forked process in which the n-th write, sync, rename or new
file fails: with ENOSPC from then on, with EIO or a MemoryError once. Of all n of an operation some, evenly spaced, are tried (`--all`: every one). Afterwards no file may
be damaged, the error must name what has run out, and the same operation without the fault must come to the same end.
"""

import argparse
import builtins
import errno
import io
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import msgspec
import safetensors.torch
import torch
import transformers.modeling_utils
from safetensors import SafetensorError
from scenes import report, training_project, workspace

from fakes.http_endpoint import ScriptedEndpoint
from fakes.projects import endpoint_project
from fakes.reporters import KeptReporter
from fakes.rollout_rows import assistant, rollout_row, user, write_rows
from fakes.training import write_run_files
from stillroom import api, files
from stillroom.export.folder import read_header
from stillroom.export.run import export_model
from stillroom.jobs.failures import failure_of
from stillroom.lineage import read_manifest, record_folder
from stillroom.rollout.run import generate_rollouts
from stillroom.run_folder import RunFolder, create_run
from stillroom.settings import Workspace
from stillroom.train.config.resume import newest_checkpoint
from stillroom.train.loop import checkpoints
from stillroom.train.run import train
from stillroom.types import RunKind, RunStatus
from stillroom_mcp.cli import main as main_of_commands

KINDS = ("ENOSPC", "EIO", "memory")
WORDS = {"ENOSPC": ("no space", "disk is full"), "EIO": ("input/output error", "i/o error"), "memory": ("memory",)}  # fmt: skip
NEW_FILE = os.O_CREAT
real_open, real_builtin_open, real_fdopen = os.open, builtins.open, os.fdopen


class Fault:
    """Counts the points at which a write may fail, and fails at one of them."""

    def __init__(self, kind: str, at: int) -> None:
        self.kind, self.at, self.count = kind, at, 0

    def point(self, *, is_rust: bool = False) -> None:
        self.count += 1
        if self.count == self.at or (self.kind == "ENOSPC" and self.count > self.at):
            if self.kind == "memory":
                raise MemoryError
            number = errno.ENOSPC if self.kind == "ENOSPC" else errno.EIO
            if is_rust:
                raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")  # fmt: skip
            raise OSError(number, os.strerror(number))

    def install(self) -> None:  # noqa: C901
        """Patches this process, which must be a fork."""
        fault = self

        class FaultyFile(io.FileIO):
            def write(self, data: Any) -> int | None:
                fault.point()
                return super().write(data)

        def fdopen(handle: int, mode: str = "r", *args: Any, **options: Any) -> Any:
            if "b" not in mode or not set(mode) & set("wa+"):
                return real_fdopen(handle, mode, *args, **options)
            raw = FaultyFile(handle, mode.replace("b", ""))
            return io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)

        def opened(path: Any, flags: int, *args: Any, **options: Any) -> int:
            if flags & NEW_FILE:
                fault.point()
            return real_open(path, flags, *args, **options)

        def opened_by_name(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if set(mode) & set("wax"):
                fault.point()
            return real_builtin_open(file, mode, *args, **options)

        def before(real: Callable[..., Any]) -> Callable[..., Any]:
            def patched(*args: Any, **options: Any) -> Any:
                fault.point()
                return real(*args, **options)

            return patched

        def save_file(tensors: Any, path: Any, *args: Any, **options: Any) -> None:
            fault.point(is_rust=True)
            real_save(tensors, path, *args, **options)

        real_save = safetensors.torch.save_file
        os.open, os.fdopen, builtins.open = opened, fdopen, opened_by_name
        os.fsync, os.replace, os.mkdir = before(os.fsync), before(os.replace), before(os.mkdir)
        files.FileIO = FaultyFile
        checkpoints.save_file = save_file
        transformers.modeling_utils.safe_save_file = save_file


@dataclass
class Outcome:
    points: int
    error: str | None


def in_fork(work: Callable[[], None], fault: Fault | None, words_of: Callable[[BaseException], str]) -> Outcome:  # fmt: skip
    """Does the work in a forked process, with the fault if there is one."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        error = None
        null = real_open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        counter = fault or Fault("none", 0)
        counter.install()
        try:
            work()
        except BaseException as caught:
            error = words_of(caught) or traceback.format_exc()
        counter.at = sys.maxsize
        os.write(writing, json.dumps([counter.count, error]).encode())
        os._exit(0)
    os.close(writing)
    with real_fdopen(reading, "rb") as stream:
        text = stream.read()
    os.waitpid(child, 0)  # no limit: run.py ends the script after an hour
    if not text:
        return Outcome(0, "the process died without a word")
    return Outcome(*json.loads(text))


class SpokenError(Exception):
    """What the command line says when it fails."""


def spoken_words(error: BaseException) -> str:
    return str(error) if isinstance(error, SpokenError) else ""


class Curation:
    """An operation of curation over a file of rollouts."""

    def __init__(self, space: Workspace, name: str) -> None:
        self.space, self.name = space, name
        rows = [
            rollout_row(
                task_id=f"t{i % 6}",
                sample=i // 6,
                reward=float(i // 6 % 2),
                messages=[user(f"{i % 6}?"), assistant(f"{i // 6} " * 100)],
            )
            for i in range(24)
        ]
        write_rows(space.root / "rows.jsonl", rows)
        self.words_of = spoken_words

    def run(self) -> None:
        more = ["--min-reward", "1"] if self.name == "filter_dataset" else []
        command = [self.name.replace("_", "-"), "rows.jsonl", "--output", "out.jsonl", *more]
        if self.name == "make_dpo_pairs":
            command = ["make-dpo-pairs", "--input", "rows.jsonl", "--output", "out.jsonl"]
        sys.stderr = io.StringIO()
        try:
            main_of_commands([*command, "--workspace", str(self.space.root)])
        except SystemExit as ending:
            if ending.code:
                raise SpokenError(sys.stderr.getvalue()) from None

    again = run

    def end(self) -> Any:
        # The side file names the input with its folder.
        files = (self.space.root / name for name in ("out.jsonl", "out.jsonl.dropped"))
        root = str(self.space.root).encode()
        return [file.read_bytes().replace(root, b"") for file in files if file.exists()]

    def damage(self, reference: Any) -> Iterator[str]:
        """Yields what is wrong on the disk after the fault: the output is there whole or not at all."""
        output = self.space.root / "out.jsonl"
        if output.exists():
            if output.read_bytes() != reference[0]:
                yield "the output is not whole"
            manifest = read_manifest(output)
            if manifest is not None and manifest.output.num_bytes != output.stat().st_size:
                yield "the manifest describes another output"
        if any(".partial-" in path.name for path in self.space.root.iterdir()):
            yield "a partial file is left"


class Rollouts:
    """Rollouts with a tool over an endpoint."""

    def __init__(self, space: Workspace, endpoint: ScriptedEndpoint) -> None:
        self.space, self.endpoint, self.number = space, endpoint, 0
        endpoint_project(space.root, num_prompts=6)
        endpoint.served.clear()

    def run(self) -> None:
        self.number += 1
        request = api.GenerateRollouts(
            input="prompts.jsonl", output="out.jsonl", provider="openai", model="m", base_url=self.endpoint.base_url,
            tools="tools.py", concurrency=2, max_concurrency=2,
        )  # fmt: skip
        folder = create_run(self.space, RunKind.ROLLOUTS, {})
        anyio.run(self._generate, request, folder.path)

    again = run

    async def _generate(self, request: Any, folder: Path) -> None:
        result = await generate_rollouts(
            self.space, request, folder=folder, reporter=KeptReporter()
        )
        if result.failed:
            raise RuntimeError(f"{result.failed} rollouts failed: {result}")

    def words_of(self, error: BaseException) -> str:
        return failure_words(error, self.space, RunKind.ROLLOUTS)

    def end(self) -> Any:
        lines = (self.space.root / "out.jsonl").read_bytes().splitlines()
        return sorted(msgspec.json.decode(line)["task_id"] for line in lines)

    def damage(self, reference: Any) -> Iterator[str]:
        output = self.space.root / "out.jsonl"
        lines = output.read_bytes().split(b"\n")[:-1] if output.exists() else []
        ids = [msgspec.json.decode(line)["task_id"] for line in lines]
        if len(set(ids)) != len(ids) or not set(ids) <= set(reference):
            yield "the output has rows twice"
        # A finished call may be made again only if its record was what could not be written.
        doubled = sum(count - 1 for count in self.endpoint.served.values())
        if doubled > 2:
            yield f"{doubled} calls were made again"


class Training:
    """A short SFT run with a checkpoint every second step."""

    def __init__(self, space: Workspace) -> None:
        self.space, self.project = space, training_project(space.root, "sft")
        self.project.config["trainer"]["num_epochs"] = 1
        self.project.write_config()

    def run(self, resume: str | None = None, name: str = "run-1") -> None:
        folder = self.space.root / "runs" / name
        request = api.StartTraining(resume=resume)
        train(self.space, request, folder=folder, reporter=KeptReporter())

    def prepare(self) -> None:
        folder = self.space.root / "runs" / "run-1"
        folder.mkdir(parents=True)
        write_run_files(folder, api.StartTraining(), RunStatus.FAILED)

    def again(self) -> None:
        checkpoint = newest_checkpoint(RunFolder(self.space.root / "runs" / "run-1"))
        folder = self.space.root / "runs" / "run-2"
        folder.mkdir()
        write_run_files(folder, api.StartTraining(), RunStatus.RUNNING)
        self.run(None if checkpoint is None else "run-1", "run-2")

    def words_of(self, error: BaseException) -> str:
        return failure_words(error, self.space, RunKind.SFT)

    def end(self) -> Any:
        for name in ("run-2", "run-1"):
            final = self.space.root / "runs" / name / "checkpoints" / "final"
            if final.exists():
                return sorted((final / "model.safetensors").read_bytes()[:100_000])
        return None

    def damage(self, reference: Any) -> Iterator[str]:
        for folder in self.space.root.glob("runs/*/checkpoints/[!.]*"):
            try:
                for file in folder.glob("*.safetensors"):
                    read_header(file)
                manifest = read_manifest(folder)
                if manifest is None or manifest.output.sha256 != record_folder(folder).sha256:
                    yield f"{folder.name} is not as its manifest says"
            except Exception as error:
                yield f"{folder.name}: {error}"


class Export:
    """The export of a model folder with an earlier export in its place."""

    def __init__(self, space: Workspace, model: Path) -> None:
        self.space = space
        shutil.copytree(model, space.root / "model")

    def run(self) -> None:
        request = api.ExportModel(model="model", output="export")
        folder = self.space.root / "runs" / "export-1"
        folder.mkdir(parents=True, exist_ok=True)
        export_model(self.space, request, folder=folder, reporter=KeptReporter())

    def prepare(self) -> None:
        self.run()

    again = run

    def words_of(self, error: BaseException) -> str:
        return failure_words(error, self.space, RunKind.EXPORT)

    def end(self) -> Any:
        return (self.space.root / "export" / "model.safetensors").read_bytes()[:100_000]

    def damage(self, reference: Any) -> Iterator[str]:
        export = self.space.root / "export"
        left = [p.name for p in self.space.root.iterdir() if p.name.startswith(".export.")]
        if not export.exists() and not any("replaced" in name for name in left):
            yield "the former export is gone"
        elif export.exists():
            manifest = read_manifest(export)
            if manifest is None or manifest.output.sha256 != record_folder(export).sha256:
                yield "the export is not as its manifest says"


def failure_words(error: BaseException, space: Workspace, kind: RunKind) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    folder = next((space.root / "runs").glob("*"), space.root)
    return failure_of(error, RunFolder(folder), kind).problem


def spread(points: int, most: int) -> list[int]:
    """Returns the numbers of points to try: all, or some that are evenly spaced with the first and the last."""
    if points <= most:
        return list(range(1, points + 1))
    return sorted({1 + round(i * (points - 1) / (most - 1)) for i in range(most)})


def tried(make: Callable[[Workspace], Any], most: int, shown: list[str]) -> dict[str, int]:
    """Tries an operation at its points, with each kind of fault, and counts."""
    tally = {"points": 0, "faults": 0, "damaged": 0, "unclear": 0, "stuck": 0, "survived": 0}
    with workspace() as space:
        operation = make(space)
        getattr(operation, "prepare", lambda: None)()
        first = in_fork(operation.run, None, operation.words_of)
        assert first.error is None, first.error
        reference, tally["points"] = operation.end(), first.points
    for kind in KINDS:
        for at in spread(first.points, most):
            with workspace() as space:
                operation = make(space)
                getattr(operation, "prepare", lambda: None)()
                outcome = in_fork(operation.run, Fault(kind, at), operation.words_of)
                tally["faults"] += 1
                tally["survived"] += outcome.error is None
                where = f"{type(operation).__name__} {getattr(operation, 'name', '')} {kind} at {at}/{first.points}"  # fmt: skip
                problems = list(operation.damage(reference))
                tally["damaged"] += bool(problems)
                is_clear = outcome.error is None or any(w in outcome.error.lower() for w in WORDS[kind])  # fmt: skip
                tally["unclear"] += not is_clear
                last = None
                if outcome.error is not None:
                    last = in_fork(operation.again, None, operation.words_of).error
                is_stuck = last is not None or operation.end() != reference
                tally["stuck"] += is_stuck
                if problems or not is_clear or is_stuck:
                    shown.append(
                        f"{where}: {problems} {(outcome.error or '')[:300]!r} then {last!r}"
                    )
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=6, help="of each operation and kind of fault")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a forked process has none of the parent's threads
    most = sys.maxsize if options.all else options.points
    shown: list[str] = []
    tallies: dict[str, dict[str, int]] = {}
    curation = ("filter_dataset", "convert_rollouts", "make_dpo_pairs", "sample_for_review")
    for name in curation:
        if options.only in name:
            tallies[name] = tried(lambda space, name=name: Curation(space, name), most, shown)
    if options.only in "rollouts":
        with ScriptedEndpoint(tool_turns=1) as endpoint:
            tallies["rollouts"] = tried(lambda space: Rollouts(space, endpoint), most, shown)
    heavy = most if options.all else max(2, most // 2)
    if options.only in "training":
        tallies["training"] = tried(Training, heavy, shown)
    if options.only in "export":
        with workspace() as space:
            training_project(space.root, "sft")
            model = next((space.root / "models").glob("*"))
            tallies["export"] = tried(lambda other: Export(other, model), heavy, shown)
    for line in shown:
        sys.stderr.write(line + "\n")
    total = {key: sum(tally[key] for tally in tallies.values()) for key in ("points", "faults", "damaged", "unclear", "stuck", "survived")}  # fmt: skip
    return report(
        3,
        f"{total['faults']} faults at {total['points']} write points of {len(tallies)} operations (ENOSPC, EIO, no memory): {total['damaged']} damaged "
        f"files, {total['unclear']} unclear errors, {total['stuck']} that did not go on to the same end",
        not (total["damaged"] or total["unclear"] or total["stuck"]),
        seed=0,
        operations=tallies,
    )


if __name__ == "__main__":
    sys.exit(main())
