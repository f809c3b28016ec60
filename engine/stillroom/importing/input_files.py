"""Resolves the inputs of an import: files, folders, globs, standard input, compressed files."""

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from stillroom import bounds
from stillroom.errors import InputError, missing_extra
from stillroom.files import partial_name
from stillroom.importing.json_rows import SOURCE_LINK
from stillroom.importing.request import ImportRollouts
from stillroom.places import real_folder
from stillroom.secrecy.readable import check_readable
from stillroom.settings import Workspace

_SIDE_FILE_SUFFIXES = (".manifest.json", ".lock", ".refused", ".dropped")
_GLOB_CHARACTERS = frozenset("*?[")


def input_files(workspace: Workspace, inputs: Sequence[str]) -> dict[Path, bool]:
    """Returns the files of the inputs, each with whether an input names it directly.

    Raises InputError for an input without files, or for a file that must not be read.
    """
    files: dict[Path, bool] = {}
    for name in inputs:
        if name == "-":
            raise InputError(
                "- means standard input, which is available on the command line only",
                "give a file, a folder or a glob",
            )
        matches = list(_files_of(workspace, name))
        if not matches:
            raise InputError(f"input {name!r} matches no files", "check the path or the pattern")
        for file, is_named in matches:
            files[file] = files.get(file, False) or is_named
    return files


def _files_of(workspace: Workspace, name: str) -> Iterator[tuple[Path, bool]]:
    """Yields the files of one input, each with whether the input names it directly."""
    path = workspace.path(name)
    if not path.exists() and _GLOB_CHARACTERS.intersection(name):
        # Path.glob does not accept absolute patterns.
        matches = map(Path, sorted(glob.glob(str(path), recursive=True)))  # noqa: PTH207
        yield from ((match, False) for match in matches if match.is_file())
        return
    path = workspace.existing(name, label="input")
    if not path.is_dir():
        yield path, True
        return
    for file in sorted(path.rglob("*")):
        is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if not is_hidden and not file.name.endswith(_SIDE_FILE_SUFFIXES) and file.is_file():
            yield file, False


STDIN = "-"


def with_standard_input(
    workspace: Workspace, request: ImportRollouts, stream: BinaryIO
) -> ImportRollouts:
    """Saves standard input to a file, and returns the request with that file in place of `-`.

    The file is next to the output and has part of its hash in its name, so equal input is saved
    once. Raises InputError if standard input is a terminal or empty.
    """
    if STDIN not in request.inputs:
        return request
    if stream.isatty():
        raise InputError(
            "- means standard input, but standard input is a terminal",
            f"pipe rows into it: `cat calls.jsonl | stillroom import-rollouts - {request.output}`",
        )
    output = workspace.output_file(request.output, label="output")
    saved = workspace.shown(_save_input(output, stream))
    inputs = tuple(saved if name == STDIN else name for name in request.inputs)
    return request.model_copy(update={"input": inputs})


def _save_input(output: Path, stream: BinaryIO) -> Path:
    """Writes a stream to a file next to an output, and returns its path."""
    temporary, digest = partial_name(output.name, secrets.token_hex(4)), hashlib.sha256()
    with real_folder(output.parent) as folder:
        handle = folder.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            with os.fdopen(handle, "wb") as file:
                while block := stream.read(_BLOCK):
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
_MAX_BEGINNING_BYTES = 2 << 20
_MAX_RATIO, _MIN_LIMIT = 200, bounds.UNPACKED.limit
"""Limits against decompression bombs: the maximum ratio of sizes (logs have 5 to 50), and a size in
bytes that is always allowed."""
_GZIP_ERRORS = (EOFError, zlib.error, gzip.BadGzipFile)
_GZIP, _ZSTANDARD = ".gz", ".zst"
PARTLY_DECOMPRESSED = "can be decompressed only in part"


@dataclass(frozen=True, slots=True)
class DecompressedFiles:
    """The decompressed copies of an import's compressed files."""

    paths: Mapping[Path, Path]
    """The decompressed copy of each compressed file."""
    problems: Mapping[Path, str]
    """The errors of the compressed files that could only partly be decompressed."""

    def readable_path(self, file: Path) -> Path:
        """Returns the decompressed copy of a file, or the file itself if it is not compressed."""
        return self.paths.get(file, file)

    def original(self, path: Path) -> Path:
        """Returns the compressed file of a decompressed copy; any other path unchanged."""
        return next((file for file, copy in self.paths.items() if copy == path), path)


def is_compressed(file: Path) -> bool:
    """Returns whether a file's name has the suffix of a compressed file."""
    return file.suffix.lower() in (_GZIP, _ZSTANDARD)


@contextmanager
def open_beginning(file: Path) -> Generator[Path]:
    """Yields a temporary file with the beginning of a compressed file's content.

    It has the name of the compressed file without its suffix. Any other file is yielded unchanged.
    Raises InputError if the file must not be read or cannot be decompressed, and MissingExtraError
    if the library for it is missing.
    """
    check_readable(file)
    if not is_compressed(file):
        yield file
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, file.stem)
        check_readable(path)
        if (
            problem := _decompress(file, path, max_bytes=_MAX_BEGINNING_BYTES)
        ) and not path.stat().st_size:
            raise InputError(
                f"{file} cannot be decompressed: {problem}",
                f"download or create it again; if it is not compressed, rename it without "
                f"{file.suffix}",
            )
        yield path


@contextmanager
def decompressed_files(files: Sequence[Path], output: Path) -> Generator[DecompressedFiles]:
    """Decompresses the compressed files among `files`; the copies are removed on exit.

    The copies are in a hidden folder next to the output; `source_folder` returns the folders of
    their compressed files. The caller must hold the output's lock.
    """
    prefix = f".{output.name}.unpacked-"
    for leftover in output.parent.glob(f"{glob.escape(prefix)}*"):
        shutil.rmtree(leftover)  # left by a killed process
    compressed = [file for file in files if is_compressed(file)]
    if not compressed:
        yield DecompressedFiles({}, {})
        return
    with tempfile.TemporaryDirectory(prefix=prefix, dir=output.parent) as folder:
        paths: dict[Path, Path] = {}
        problems: dict[Path, str] = {}
        for number, file in enumerate(compressed):
            paths[file] = Path(folder, str(number), file.stem)
            paths[file].parent.mkdir()
            with suppress(OSError):  # Not every file system has symbolic links.
                (paths[file].parent / SOURCE_LINK).symlink_to(file.parent)
            if (problem := _decompress(file, paths[file])) is not None:
                problems[file] = problem
        yield DecompressedFiles(paths, problems)


def _decompress(file: Path, path: Path, *, max_bytes: int | None = None) -> str | None:
    """Decompresses a file to `path`; returns None if it is complete, else the error.

    Stops after `max_bytes`. Raises InputError for a file that looks like a decompression bomb.
    """
    limit, num_bytes = max(_MIN_LIMIT, _MAX_RATIO * file.stat().st_size), 0
    stream, corruption_errors = _open_compressed(file)
    with path.open("wb") as output, stream:
        try:
            while (block := stream.read1(_BLOCK)) and (max_bytes is None or num_bytes < max_bytes):
                output.write(block)
                num_bytes += len(block)
                if num_bytes > limit:
                    raise InputError(
                        f"{file} decompresses to more than {limit:,} bytes, as a zip bomb would",
                        "if you trust it, decompress it yourself and give the result",
                    )
        except corruption_errors as error:
            return str(error)
    return None


def zstd_library() -> Any:
    """Returns the Zstandard module of Python or its backport; None if neither is installed."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def _open_compressed(file: Path) -> tuple[gzip.GzipFile, tuple[type[Exception], ...]]:
    """Opens a compressed file; also returns the exceptions that a corrupt file raises."""
    if file.suffix.lower() == _GZIP:
        return gzip.open(file), _GZIP_ERRORS
    if (library := zstd_library()) is None:
        raise missing_extra("traces", f"decompressing {file}")
    # The library refuses frames that need more than 128 MB of memory.
    return library.open(file), (EOFError, library.ZstdError)
