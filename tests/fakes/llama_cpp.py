"""A stand-in for llama.cpp's converter: says what it was given, and writes what it is told to."""

import json
from pathlib import Path

_SCRIPT = """\
import json, sys, time
from pathlib import Path
model, outfile, outtype = sys.argv[1], sys.argv[3], sys.argv[5]
assert (sys.argv[2], sys.argv[4]) == ("--outfile", "--outtype")
{body}
"""
WRITES = """\
held = sorted(path.name for path in Path(model).iterdir())
Path(outfile).write_bytes(b"GGUF" + json.dumps([outtype, held]).encode())
print("converted")"""
FAILS = "sys.exit('Model FooForCausalLM is not supported')"
LACKS_A_PACKAGE = "import sentencepiece_of_nobody"
LACKS_A_LIBRARY = "sys.exit('LlamaModel requires the SentencePiece library but it was not found')"
OWN_TOKENIZER = "raise NotImplementedError('BPE pre-tokenizer was not recognized')"
NO_VOCABULARY = "raise FileNotFoundError('File not found: /m/tokenizer.model')"
NO_MEMORY = "raise MemoryError"
IS_KILLED = "import os; os.kill(os.getpid(), 9)"
WRITES_NOTHING = "print('done')"
WRITES_OTHER = "Path(outfile).write_bytes(b'<html>')"
HANGS = "Path(outfile).write_bytes(b'GG'); time.sleep(60)"


def write_checkout(folder: Path, body: str = WRITES) -> Path:
    """Writes a checkout with a converter that does `body`; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "convert_hf_to_gguf.py"
    script.write_text(_SCRIPT.format(body=body), encoding="utf-8")
    return folder


def read_gguf(path: Path) -> tuple[str, list[str]]:
    """Returns the type that was asked for, and the files the converter saw."""
    requested, held = json.loads(path.read_bytes().removeprefix(b"GGUF"))
    return requested, held
