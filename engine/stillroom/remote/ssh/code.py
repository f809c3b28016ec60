"""This very code, as one archive that is named by its content."""

import gzip
import io
import tarfile
from functools import cache
from pathlib import Path

import stillroom
from stillroom.remote.agent.environment import code_files, code_hash_of


@cache
def code_hash() -> str:
    """Returns a name for the code of this process's own package, as its files are."""
    return code_hash_of(_files())


@cache
def code_archive() -> bytes:
    """Returns the package's files as a tar.gz; the same files give the same bytes."""
    archive = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=archive, mode="wb", mtime=0, compresslevel=4) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as files,
    ):
        for name, data in _files():
            entry = tarfile.TarInfo(f"stillroom/{name}")
            entry.size, entry.mode = len(data), 0o600
            files.addfile(entry, io.BytesIO(data))
    return archive.getvalue()


@cache
def _files() -> list[tuple[str, bytes]]:
    """Returns the files as they were at the first call, so that hash and archive agree."""
    return list(code_files(Path(stillroom.__file__).parent))
