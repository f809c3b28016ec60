"""The picture of a task's results, docs/images/results.svg, from the figures of results.py."""

from collections.abc import Mapping
from html import escape

from stillroom.evaluate.intervals import Estimate

_WIDTH, _LEFT, _RIGHT, _ROW, _TOP = 900, 190, 60, 34, 84
_STYLE = """
  text { font: 15px system-ui, sans-serif; fill: #24292f }
  .title { font-weight: 600; font-size: 18px } .quiet { fill: #57606a; font-size: 13px }
  .paper { fill: #fff } .grid { stroke: #d0d7de } .new { fill: #0d9488 }
  .seen { fill: none; stroke: #8c959f } .interval { stroke: #24292f; stroke-width: 1.5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .quiet { fill: #9198a1 } .paper { fill: #0d1117 } .grid { stroke: #30363d }
    .interval { stroke: #e6edf3 } .seen { stroke: #6e7681 } .new { fill: #14b8a6 }
  }
"""


def plot(title: str, subtitle: str, accuracies: Mapping[str, tuple[Estimate, Estimate]]) -> str:
    """Returns an SVG of bars: for each method its accuracy on training forms and on new forms.

    New forms have a filled bar with its interval, training forms an outlined one.
    """
    height = _TOP + _ROW * len(accuracies) + 36
    span = _WIDTH - _LEFT - _RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect class="paper" width="{_WIDTH}" height="{height}" rx="8"/>',
        f'<text class="title" x="20" y="32">{escape(title)}</text>',
        f'<text class="quiet" x="20" y="56">{escape(subtitle)}</text>',
    ]
    for tick in range(0, 101, 25):
        x = _LEFT + span * tick / 100
        parts += [
            f'<line class="grid" x1="{x:g}" x2="{x:g}" y1="{_TOP - 8}" y2="{height - 32}"/>',
            f'<text class="quiet" x="{x:g}" y="{height - 14}" text-anchor="middle">{tick}%</text>',
        ]
    for i, (method, (seen, new)) in enumerate(accuracies.items()):
        y, end = _TOP + _ROW * i, _LEFT + span * new.value
        low, high = (_LEFT + span * bound for bound in (new.low, new.high))
        parts += [
            f'<text x="{_LEFT - 12}" y="{y + 17}" text-anchor="end">{escape(method)}</text>',
            f'<rect class="seen" x="{_LEFT}" y="{y}" width="{span * seen.value:.1f}" height="24"/>',
            f'<rect class="new" x="{_LEFT}" y="{y + 4}" width="{end - _LEFT:.1f}" height="16"/>',
            f'<line class="interval" x1="{low:.1f}" x2="{high:.1f}" y1="{y + 12}" y2="{y + 12}"/>',
            f'<text class="quiet" x="{max(high, _LEFT) + 8:.1f}" y="{y + 17}">{new.value:.1%}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])
