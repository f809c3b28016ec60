"""The job with which a rented cluster knows that something of ours still runs on it.

The worker there outlives every connection and is no job of the provider's, which therefore would
take the machine for idle and put it down under the run. The job looks for our processes and ends
when there have been none for a few minutes; from then on the provider's own belt counts.
"""

import re
import shlex
from collections.abc import Sequence

_PROGRAMS = (r"[s]tillroom\.remote\.(agent|there)", r"[s]tillroom\.jobs\.keeper")
_LOOK_EVERY_S = 15
_PATIENCE = 20
"""The looks in a row that must find nothing. Installing and connecting again take a moment."""


def hold_script(
    folder: str,
    *,
    programs: Sequence[str] = _PROGRAMS,
    look_every_s: float = _LOOK_EVERY_S,
    patience: int = _PATIENCE,
) -> str:
    """Returns a script for `sh` that ends once none of our processes has run for a while.

    Ours are the `programs` of this package (patterns of command lines), and what is started from
    our `folder` there.
    """
    name = folder.rstrip("/").rpartition("/")[2]
    # The brackets keep the pattern from matching its own text in a command line.
    pattern = "|".join([*programs, f"/[{name[0]}]{re.escape(name[1:])}/"])
    return f"""\
quiet=0
while [ "$quiet" -lt {patience} ]; do
  if cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\000' ' ' | grep -qE {shlex.quote(pattern)}; then
    quiet=0
  else
    quiet=$((quiet + 1))
  fi
  sleep {look_every_s}
done
"""
