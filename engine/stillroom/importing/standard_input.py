"""Keeps what came on standard input in a file, so that rows made of it can be traced back to it."""

import hashlib
import os
import secrets
from pathlib import Path
from typing import BinaryIO

from stillroom.errors import InputError
from stillroom.files import partial_name
from stillroom.importing.request import ImportRollouts
from stillroom.places import real_folder
from stillroom.settings import Workspace

STDIN = "-"
_BLOCK = 1 << 20


def with_standard_input(
    workspace: Workspace, request: ImportRollouts, stream: BinaryIO
) -> ImportRollouts:
    """Returns the request with a file in place of `-`, which is standard input.

    The file stands beside the output, and its name has a part of its hash: the same input is kept
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
    kept = workspace.shown(_kept(output, stream))
    inputs = tuple(kept if name == STDIN else name for name in request.inputs)
    return request.model_copy(update={"input": inputs})


def _kept(output: Path, stream: BinaryIO) -> Path:
    """Writes a stream to a file beside an output, and returns its path."""
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
