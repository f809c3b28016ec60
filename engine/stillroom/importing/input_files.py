"""The files of an import: those that its inputs name, standard input, and unpacked files."""

import glob
import gzip
import hashlib
import importlib
import os
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from stillroom import bounds
from stillroom.errors import InputError, missing_extra
from stillroom.files import partial_name
from stillroom.importing.request import ImportRollouts
from stillroom.places import real_folder
from stillroom.secrecy.readable import check_readable
from stillroom.settings import Workspace

_OURS = (".manifest.json", ".lock", ".refused", ".dropped")
_GLOB = frozenset("*?[")


def input_files(workspace: Workspace, inputs: Sequence[str]) -> dict[Path, bool]:
    """Returns the files behind inputs; True for those that an input names itself.

    Raises InputError for an input without files, or a file that must not be read.
    """
    files: dict[Path, bool] = {}
    for name in inputs:
        if name == "-":
            raise InputError(
                "- is standard input, which only the command line has",
                "give a file, a folder or a glob",
            )
        found = list(_files_of(workspace, name))
        if not found:
            raise InputError(f"input {name!r} holds no files", "check the path, or the pattern")
        for file, is_named in found:
            files[file] = files.get(file, False) or is_named
    return files


def _files_of(workspace: Workspace, name: str) -> Iterator[tuple[Path, bool]]:
    path = workspace.path(name)
    if not path.exists() and _GLOB.intersection(name):
        # Not Path.glob, which needs a pattern below a folder.
        matches = map(Path, sorted(glob.glob(str(path), recursive=True)))  # noqa: PTH207
        yield from ((match, False) for match in matches if match.is_file())
        return
    path = workspace.existing(name, label="input")
    if not path.is_dir():
        yield path, True
        return
    for file in sorted(path.rglob("*")):
        is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if not is_hidden and not file.name.endswith(_OURS) and file.is_file():
            yield file, False


STDIN = "-"
_READ_BLOCK = 1 << 20


def with_standard_input(
    workspace: Workspace, request: ImportRollouts, stream: BinaryIO
) -> ImportRollouts:
    """Returns the request with a file in place of `-`, which is standard input.

    The file is next to the output, and its name has a part of its hash: the same input is kept
    once. Raises InputError if standard input is a terminal or empty.
    """
    if STDIN not in request.inputs:
        return request
    if stream.isatty():
        raise InputError(
            "- is standard input, and nothing is piped into it",
            f"write e.g. `cat calls.jsonl | stillroom import-rollouts - {request.output}`",
        )
    output = workspace.output_file(request.output, label="output")
    kept = workspace.shown(_kept_input(output, stream))
    inputs = tuple(kept if name == STDIN else name for name in request.inputs)
    return request.model_copy(update={"input": inputs})


def _kept_input(output: Path, stream: BinaryIO) -> Path:
    """Writes a stream to a file next to an output, and returns its path."""
    temporary, digest = partial_name(output.name, secrets.token_hex(4)), hashlib.sha256()
    with real_folder(output.parent) as folder:
        handle = folder.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            with os.fdopen(handle, "wb") as file:
                while block := stream.read(_READ_BLOCK):
                    digest.update(block)
                    file.write(block)
                if not file.tell():
                    raise InputError("standard input is empty", "pipe rows into it")
            stem = output.name.removesuffix(".jsonl")
            name = f"{stem}.stdin-{digest.hexdigest()[:8]}.jsonl"
            folder.rename(temporary, name)
        except BaseException:
            folder.remove(temporary)
            raise
    return output.with_name(name)


_BLOCK = 1 << 20
_BEGINNING = 2 << 20
_MOST_TIMES, _SMALL = 200, bounds.UNPACKED.most
"""Logs unpack to 5 to 50 times their size; a small file may unpack to more."""
_BROKEN = (EOFError, zlib.error, gzip.BadGzipFile)
_GZIP, _ZSTANDARD = ".gz", ".zst"
NOT_WHOLE = "cannot be unpacked to its end"


@dataclass(frozen=True, slots=True)
class UnpackedFiles:
    """Where the packed files of an import are while it runs."""

    paths: Mapping[Path, Path]
    """The unpacked file of each packed one."""
    problems: Mapping[Path, str]
    """The packed files whose end could not be unpacked, each with the reason."""

    def read_from(self, file: Path) -> Path:
        """Returns the file to read in place of one that may be packed."""
        return self.paths.get(file, file)

    def original(self, path: Path) -> Path:
        """Returns the file that a file which is read was unpacked from, or else itself."""
        return next((file for file, unpacked in self.paths.items() if unpacked == path), path)


def is_packed(file: Path) -> bool:
    """Returns whether a file is packed, by its name."""
    return file.suffix.lower() in (_GZIP, _ZSTANDARD)


@contextmanager
def beginning_of(file: Path) -> Generator[Path]:
    """Yields a file under the name that a packed one has inside, with the beginning of its content.

    Another file is yielded itself. Raises InputError if it must not be read, or is not packed, and
    MissingExtraError if the library that unpacks it is missing.
    """
    check_readable(file)
    if not is_packed(file):
        yield file
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, file.stem)
        check_readable(path)
        if (problem := _unpack(file, path, most=_BEGINNING)) and not path.stat().st_size:
            raise InputError(
                f"{file} cannot be unpacked: {problem}",
                f"if it is not compressed, rename it without {file.suffix}",
            )
        yield path


@contextmanager
def unpacked_files(files: Sequence[Path], output: Path) -> Generator[UnpackedFiles]:
    """Yields the unpacked files of those that are packed; they are removed in the end.

    They are in a hidden folder next to the output, whose lock the caller holds.
    """
    prefix = f".{output.name}.unpacked-"
    for leftover in output.parent.glob(f"{glob.escape(prefix)}*"):
        shutil.rmtree(leftover)  # what a killed process left
    packed = [file for file in files if is_packed(file)]
    if not packed:
        yield UnpackedFiles({}, {})
        return
    with tempfile.TemporaryDirectory(prefix=prefix, dir=output.parent) as folder:
        paths: dict[Path, Path] = {}
        problems: dict[Path, str] = {}
        for number, file in enumerate(packed):
            paths[file] = Path(folder, str(number), file.stem)
            paths[file].parent.mkdir()
            if (problem := _unpack(file, paths[file])) is not None:
                problems[file] = problem
        yield UnpackedFiles(paths, problems)


def _unpack(file: Path, path: Path, *, most: int | None = None) -> str | None:
    """Writes the content of a packed file; returns why its end is missing, None if it is whole.

    `most` is after how many bytes to stop. Raises InputError for a file that unpacks to far more
    than logs do.
    """
    limit, num_bytes = max(_SMALL, _MOST_TIMES * file.stat().st_size), 0
    stream, broken = _opened(file)
    with path.open("wb") as output, stream:
        try:
            while (block := stream.read1(_BLOCK)) and (most is None or num_bytes < most):
                output.write(block)
                num_bytes += len(block)
                if num_bytes > limit:
                    raise InputError(
                        f"{file} unpacks to more than {limit:,} bytes, as no log does",
                        "unpack it yourself if it is one",
                    )
        except broken as error:
            return str(error)
    return None


def zstd_library() -> Any:
    """Returns the Zstandard library, Python's own or its backport; None if neither is installed."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def _opened(file: Path) -> tuple[gzip.GzipFile, tuple[type[Exception], ...]]:
    """Returns a packed file's content, and the errors that reading it raises where it is broken."""
    if file.suffix.lower() == _GZIP:
        return gzip.open(file), _BROKEN
    if (library := zstd_library()) is None:
        raise missing_extra("traces", f"unpacking {file}")
    # A frame that asks for more than 128 MB of memory is refused by the library.
    return library.open(file), (EOFError, library.ZstdError)
