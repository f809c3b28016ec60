"""How much of an endpoint's limit is used, and how many requests it refuses: 40 s each, one JSON line a case.

limits.py [CASE …]: rate, moving, tokens, tokens_told, concurrency, long_waits.
"""

import sys
import tempfile
from pathlib import Path

from common import endpoint, ours, report, write_project

CASES = {
    "rate": (["--rps", "200"], 2000),
    "moving": (["--rps", "0:200,13:100,26:300"], 2000),
    "tokens": (["--tps", "40000", "--token-burst", "4000"], 1500),
    "tokens_told": (["--tps", "40000", "--token-burst", "40000", "--tell"], 1500),
    "concurrency": (["--max-in-flight", "20", "--latency", "0.1", "--sigma", "0.4"], 1900),
    "long_waits": (["--rps", "200", "--long-waits", "5", "--long-wait-s", "60"], 4000),
}


def main() -> None:
    for name in sys.argv[1:] or CASES:
        settings, num = CASES[name]
        with tempfile.TemporaryDirectory() as folder, endpoint(*settings) as (url, counters):
            write_project(Path(folder), num)
            done = ours(Path(folder), url)
            seen = counters()
        used = {key: round(v["granted"] / v["offered"], 4) for key, v in seen["limits"].items()}
        if name == "concurrency":
            used = {"at_once": round(seen["answered"] * 0.1 / (20 * seen["span_s"]), 4)}
        report(
            case=name, share_of_limit_used=used, refused=seen.get("refused", 0), requests=seen["requests"],
            share_refused=round(seen.get("refused", 0) / seen["requests"], 4), seconds=seen["span_s"],
            rollouts=num, succeeded=done["succeeded"], lost=num - done["succeeded"],
        )  # fmt: skip


if __name__ == "__main__":
    main()
