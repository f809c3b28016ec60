"""Limits on input from machines, endpoints, clients, files, models and tools.

Each limit is declared here once, and docs/trust.md lists them. Limits that are options of a request
(`max_tokens`, `request_timeout`, `tool_timeout`, `rollout_timeout`, budgets) are not listed here.
"""

from dataclasses import dataclass
from typing import Literal

Unit = Literal["bytes", "seconds", "characters", "levels", "values"]


@dataclass(frozen=True, slots=True)
class Bound:
    """The limit on one kind of input."""

    limit: int
    """The limit, in `unit`."""
    unit: Unit
    sender: str
    """What sends the input, e.g. a model."""
    subject: str
    """What is limited."""
    consequence: str
    """What happens if the limit is exceeded."""

    @property
    def size(self) -> str:
        """The limit as text, such as `64 MB`; of limits, kB, MB and GB are powers of 1024."""
        if self.unit == "bytes":
            power = next(n for n in (30, 20, 10, 0) if self.limit >= 1 << n)
            return f"{self.limit >> power:,} {({30: 'GB', 20: 'MB', 10: 'kB', 0: 'bytes'})[power]}"
        if self.unit == "seconds":
            hours, minutes = divmod(self.limit // 60, 60)
            short = f"{minutes} min" if self.limit >= 120 else f"{self.limit} s"
            return f"{hours} h" if hours and not minutes else short
        return f"{self.limit:,}" if self.unit == "values" else f"{self.limit:,} {self.unit}"


_MACHINE = "another machine"
_LOST = "the connection is treated as lost and reopened"
GREETING = Bound(1 << 20, "bytes", _MACHINE, "output before the first message", _LOST)
FRAME_HEADER = Bound(1 << 10, "bytes", _MACHINE, "the header of a message", _LOST)
FRAME = Bound(1 << 28, "bytes", _MACHINE, "a message, compressed or not", _LOST)
SCRIPT = Bound(8 << 20, "bytes", _MACHINE, "the output of a script", "an error")
SCRIPT_ERRORS = Bound(
    1 << 14, "bytes", _MACHINE, "standard error of a script", "only the end is kept"
)
PROBED_VALUES = Bound(
    64, "values", _MACHINE, "GPUs and Pythons that it reports", "the rest is left out"
)
PROBED_VALUE = Bound(1000, "characters", _MACHINE, "the name of a GPU or Python", "it is truncated")
JOB_UPDATES = Bound(1 << 29, "bytes", _MACHINE, "a batch of updates in a bucket", "an error")
GROWING_FILES = Bound(10_000, "values", _MACHINE, "growing files that it sends", "an error")
LOGIN = Bound(60, "seconds", _MACHINE, "logging in", "it counts as unreachable")
PROBE = Bound(
    25, "seconds", _MACHINE, "its reply to `list_machines`", "it is listed without details"
)

PROVIDER_CALL = Bound(1800, "seconds", _MACHINE, "a SkyPilot call that rents it", "an error")

_ENDPOINT = "a model's endpoint"
BODY = Bound(64 << 20, "bytes", _ENDPOINT, "a reply, compressed or not", "the call fails")
REPLY_HEADERS = Bound(128, "values", _ENDPOINT, "headers of a reply", "the call fails")
REPLY_HEADER = Bound(16 << 10, "bytes", _ENDPOINT, "one header", "the call fails")
CONNECT = Bound(30, "seconds", _ENDPOINT, "connecting", "the call is retried")
ATTEMPTS = Bound(6, "values", _ENDPOINT, "failed attempts of a call", "the rollout fails")
RATE_LIMIT = Bound(900, "seconds", _ENDPOINT, "waiting for its rate limit", "the rollout fails")
DOWN = Bound(3600, "seconds", _ENDPOINT, "waiting for your own server that is down", "the run ends")
SERVER_RESPONSE = Bound(30, "seconds", _ENDPOINT, "its list of models", "an error")
SERVER_LIST = Bound(8 << 20, "bytes", _ENDPOINT, "its list of models", "an error")
PRICE_LIST = Bound(32 << 20, "bytes", _ENDPOINT, "the fetched list of prices", "an error")

_MODEL = "a model"
TOOL_CALLS = Bound(
    1024, "values", _MODEL, "tool calls in one turn", "the reply is treated as malformed"
)
ANSWER = Bound(200_000, "characters", _MODEL, "an answer that is compared", "only its end is read")
JUDGED = Bound(
    100_000, "characters", _MODEL, "the text that a judge reads", "the middle is left out"
)
VERDICT = Bound(20_000, "characters", _MODEL, "a judge's reply", "the rest is not read")
TENSOR_HEADER = Bound(100 << 20, "bytes", _MODEL, "the header of a weights file", "an error")
GGUF_ENTRIES = Bound(1 << 16, "values", _MODEL, "values, or tensors, of a GGUF file", "an error")
GGUF_HEADER = Bound(1 << 28, "bytes", _MODEL, "a GGUF file before its weights", "an error")
LICENCE = Bound(200_000, "characters", _MODEL, "its card or licence", "the rest is not read")
TEMPLATE = Bound(60, "seconds", _MODEL, "rendering with its chat template", "the process is killed")
TEMPLATE_MEMORY = Bound(
    3 << 30, "bytes", _MODEL, "memory for its chat template", "the process is killed"
)

_PROGRAM = "a program that is recorded"
REQUEST_LINE = Bound(256 << 10, "bytes", _PROGRAM, "a request's first line or header", "HTTP 400")
REQUEST_HEADERS = Bound(256, "values", _PROGRAM, "headers of a request", "HTTP 400")
IDLE = Bound(300, "seconds", _PROGRAM, "an idle connection", "it is closed")
REPLAYED = Bound(
    64 << 20, "bytes", _PROGRAM, "a request that replay answers", "only its beginning is compared"
)
CALL_KEYS = Bound(
    8 << 10, "bytes", _PROGRAM, "keys in a call (the first 256 bytes of each)",
    "it is forwarded, and every text in its record is `[key]`",
)  # fmt: skip
_UPSTREAM = "a recorder's upstream"
UPSTREAM_LINE = Bound(256 << 10, "bytes", _UPSTREAM, "a reply's first line or header", "HTTP 502")
UPSTREAM_HEADERS = Bound(256, "values", _UPSTREAM, "headers of a reply", "HTTP 502")
RECORDED = Bound(
    16 << 20, "bytes", _UPSTREAM, "the recorded part of a request or reply (`--max-body-mb`)",
    "it is forwarded, and truncated in the record",
)  # fmt: skip

_CLIENT = "a client of the HTTP server"
MCP_REQUEST = Bound(4 << 20, "bytes", _CLIENT, "a request's body", "HTTP 413")
WHOLE_REQUEST = Bound(30, "seconds", _CLIENT, "receiving a request", "its connection is closed")
SESSIONS = Bound(1000, "values", _CLIENT, "open sessions", "a new one is refused")

_FILE = "a file"
ROW = Bound(64 << 20, "bytes", _FILE, "a row", "it is refused with its file and line")
SHOWN_ROW = Bound(8 << 20, "bytes", _FILE, "a row on the dashboard", "only its beginning is shown")
DOCUMENT = Bound(64 << 20, "bytes", _FILE, "run.json, a manifest or similar", "an error")
YAML = Bound(256 << 10, "characters", _FILE, "a YAML file", "an error")
YAML_VALUES = Bound(
    1 << 20, "values", _FILE, "values in a YAML file after expanding aliases", "an error"
)
UNPACKED = Bound(
    1 << 30, "bytes", _FILE, "a decompressed log, or 200 times its size if that is more", "an error"
)
SPAN_LEVELS = Bound(40, "levels", _FILE, "nesting in a span's attribute", "the rest is left out")
ZIP_LEVELS = Bound(
    20, "levels", _FILE, "nesting of a message with attachments", "the rest stays as it is"
)
AGENT_LEVELS = Bound(20, "levels", _FILE, "nested sub-agents", "the rest is refused")
FORKS = Bound(64, "values", _FILE, "nested forks of a session", "the rest is left out")
RESPONSES = Bound(
    10_000, "values", _FILE, "responses that continue one another", "earlier messages are left out"
)
IMPORTING = Bound(6 * 3600, "seconds", _FILE, "an import without a run", "the process is killed")
FILTERING = Bound(
    3600, "seconds", _FILE, "filtering, converting or pairing without a run",
    "the process is killed",
)  # fmt: skip
HOST_CONFIG = Bound(8 << 20, "bytes", _FILE, "a host's config for `setup`", "an error")
INSTRUCTION = Bound(4 << 20, "bytes", _FILE, "an instruction (`context_file`)", "an error")
EXPECTED = Bound(10_000, "characters", _FILE, "an expected answer", "an error")
RUBRIC = Bound(1 << 20, "bytes", _FILE, "judge.yml", "an error")
LOG = Bound(32 << 20, "bytes", _FILE, "a run's log.txt", "the middle is left out")

_TOOL = "a tool or page"
TOOL_LINE = Bound(
    64 << 20, "bytes", _TOOL, "a message from tools.py or an MCP server", "the call fails"
)
TOOL_RESULT = Bound(
    1_000_000, "characters", _TOOL, "a tool's result", "it is truncated, with a note"
)
TOOL_ERRORS = Bound(4096, "bytes", _TOOL, "an MCP server's standard error", "only the end is kept")
TOOL_PAGES = Bound(100, "values", _TOOL, "pages of an MCP server's tools", "an error")
TOOL_START = Bound(60, "seconds", _TOOL, "loading tools.py", "an error")
PAGE_HTML = Bound(1_500_000, "characters", _TOOL, "a page's HTML", "it is truncated")
PAGE_TEXT = Bound(400_000, "characters", _TOOL, "a page's text", "it is truncated")
PAGE_ELEMENTS = Bound(400, "values", _TOOL, "links and fields of a page", "the rest is left out")
PAGE_READ = Bound(32 << 20, "bytes", _TOOL, "a page's text as Markdown", "the page has no text")
PAGE_MEMORY = Bound(4 << 30, "bytes", _TOOL, "memory for reading a page", "the page has no text")
PROXY_HEAD = Bound(64 << 10, "bytes", _TOOL, "the headers of a page's request", "it is refused")
