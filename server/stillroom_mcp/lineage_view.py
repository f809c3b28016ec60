"""The text of a lineage on the command line: the tree of inputs and the history of one row."""

from collections.abc import Iterator

from stillroom import api

_MARKS = {"same": "", "grown": " (grown since)", "unchecked": ""}


def lineage_lines(lineage: api.Lineage) -> Iterator[str]:
    """Yields a lineage as lines of text: its tree, its row's steps, its tag and its problems."""
    yield from _tree(lineage.root, "", "")
    if lineage.row:
        yield "row:"
        for step in lineage.row:
            words = [step.what, step.at, step.row, step.id, step.decision, "; ".join(step.reasons)]
            if step.like:
                words.append(f"like {step.like}")
            if step.also_at:
                words.append(f"the same stands at {', '.join(step.also_at)}")
            mark = _MARKS.get(step.state, f" ({step.state.upper()})")
            yield "  " + "  ".join(word for word in words if word) + mark
    if lineage.tagged:
        yield f"tagged: {lineage.tagged}"
    if lineage.sources:
        yield f"sources: {lineage.num_sources} rows in {lineage.sources}"
    for problem in lineage.problems:
        yield f"problem: {problem}"


def _tree(node: api.LineageNode, lead: str, below: str) -> Iterator[str]:
    yield lead + _words(node)
    rest = [f"{count} more, {state}" for state, count in node.more_inputs.items()]
    last = len(node.inputs) + len(rest) - 1
    for place, child in enumerate(node.inputs):
        is_last = place == last
        yield from _tree(
            child, below + ("└─ " if is_last else "├─ "), below + ("   " if is_last else "│  ")
        )
    for place, text in enumerate(rest, len(node.inputs)):
        yield below + ("└─ " if place == last else "├─ ") + text


def _words(node: api.LineageNode) -> str:
    mark = _MARKS.get(node.state, f" ({node.state.upper()})")
    parts = [f"{node.role}: {node.path}" if node.role else node.path]
    if node.sha256:
        parts.append(node.sha256)
    if node.made_by:
        counts = ", ".join(f"{name} {count}" for name, count in node.counts.items())
        parts.append(f"by {node.made_by}" + (f" ({counts})" if counts else ""))
    if node.run_id:
        parts.append(node.run_id)
    parts += [f"{name}={value}" for name, value in node.options.items()]
    if node.versions:
        parts.append(f"= {', '.join(node.versions)}")
    if node.note:
        parts.append(f"[{node.note}]")
    return "  ".join(parts) + mark
