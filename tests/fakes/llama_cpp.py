"""A stand-in for llama.cpp's converter: says what it was given, and writes what it is told to."""

import json
import sys
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


_SERVER = """\
#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
assert sys.argv[1] == "-m" and Path(sys.argv[2]).read_bytes()[:4] == b"GGUF"
{start}
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{"data": []}})
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        message = {{"role": "assistant", "content": {answer!r}}}
        self.answer({{"choices": [{{"message": message, "finish_reason": "stop"}}],
                     "usage": {{"prompt_tokens": 1, "completion_tokens": 1}}}})
    def answer(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *_):
        pass
host, port = sys.argv[sys.argv.index("--host") + 1], int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer((host, port), Handler).serve_forever()
"""


def write_server(checkout: Path, answer: str, *, start: str = "") -> Path:
    """Writes a llama-server into a checkout that gives this answer; `start` runs before it."""
    script = checkout / "build" / "bin" / "llama-server"
    script.parent.mkdir(parents=True, exist_ok=True)
    text = _SERVER.format(python=sys.executable, answer=answer, start=start)
    script.write_text(text, encoding="utf-8")
    script.chmod(0o755)
    return script
