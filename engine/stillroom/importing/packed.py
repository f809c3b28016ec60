"""Unpacks the .gz and .zst files of an import, so that they are read as what they hold."""

import glob
import gzip
import shutil
import tempfile
import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stillroom.errors import InputError, missing_extra
from stillroom.secrecy.readable import check_readable

_BLOCK = 1 << 20
_BEGINNING = 2 << 20
_MOST_TIMES, _SMALL = 200, 1 << 30
"""Logs unpack to 5 to 50 times their size; what is small may come to more."""
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
            raise InputError(f"{file} cannot be unpacked: {problem}", "name it as what it is")
        yield path


@contextmanager
def unpacked_files(files: Sequence[Path], output: Path) -> Generator[UnpackedFiles]:
    """Yields the unpacked files of those that are packed; they are removed in the end.

    They lie in a hidden folder beside the output, whose lock the caller holds.
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


def _opened(file: Path) -> tuple[gzip.GzipFile, tuple[type[Exception], ...]]:
    """Returns a packed file's content, and the errors that reading it raises where it is broken."""
    if file.suffix.lower() == _GZIP:
        return gzip.open(file), _BROKEN
    # Those who only read the command line load nothing of the recorder.
    from stillroom.recording.encodings import zstd_library

    if (library := zstd_library()) is None:
        raise missing_extra("traces", f"unpacking {file}")
    # A frame that asks for more than 128 MB of memory is refused by the library.
    return library.open(file), (EOFError, library.ZstdError)
