"""Runs every use of every family's tiny model and writes docs/families.md. run.py [--only qwen3 …] [--again] [--page-only]

Figures are kept in figures.json. A family that was run with this engine and these libraries is not run again, so that a run which
was stopped goes on; --again runs it all the same. Exits with 1 if a cell that said yes says no now, or if fewer than 30 families
say yes in every cell.
"""

import argparse
import datetime
import hashlib
import json
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

from limits import COLUMNS, DPO_LOSS, GRADIENT, LOGPROB, LOSS, WEIGHTS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FIGURES, PAGE = HERE / "figures.json", ROOT / "docs" / "families.md"
LIBRARIES = ("transformers", "peft", "torch")
AT_LEAST = 30


def names() -> list[str]:
    """Returns the families of the table: decoders, then multimodal checkpoints."""
    sys.path.append(str(ROOT / "tests"))
    from fakes import families, multimodal

    # transformers builds Gemma 3n's towers with the package timm, which is not installed here.
    whole = [name for name in multimodal.FAMILIES if name != "gemma3n"]
    return [*families.FAMILIES, *(f"{name} checkpoint" for name in whole)]


def digest() -> str:
    """Returns a hash of the engine, the tiny models and this benchmark."""
    files = [
        *(ROOT / "engine").rglob("*.py"),
        *(ROOT / "tests" / "fakes").glob("*.py"),
        *HERE.glob("*.py"),
    ]
    whole = hashlib.sha256()
    for file in sorted(files):
        whole.update(file.read_bytes())
    return whole.hexdigest()[:16]


def reason(error: Exception) -> str:
    """Returns one sentence on why a cell says no."""
    from cells import InexactError

    from stillroom.errors import EngineError

    if isinstance(error, ExceptionGroup):
        return reason(error.exceptions[0])
    if isinstance(error, EngineError):
        return f"refused: {error.problem}"
    if isinstance(error, InexactError):
        return str(error)
    first = str(error).strip().splitlines()
    return f"fails: {type(error).__name__}: {first[0] if first else ''}"


def measure(name: str, *, loud: bool) -> dict[str, Any]:
    """Returns all cells of one family."""
    from cells import CELLS, Family

    cells: dict[str, Any] = {}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        family = Family(name, Path(folder))
        for title, cell in CELLS.items():
            started = time.process_time()
            try:
                figures = cell(family)
            except Exception as error:
                if loud:
                    traceback.print_exc()
                cells[title] = {"works": False, "why": reason(error).replace(folder, "")[:300]}
            else:
                if loud:
                    print(
                        f"{title}: {time.process_time() - started:.1f} CPU s, {figures}",
                        file=sys.stderr,
                    )
                cells[title] = {
                    "works": True,
                    "figures": {k: float(f"{v:.2g}") for k, v in figures.items()},
                }
        shape = family.shape
        about = {
            "title": title_of(family),
            "boundaries": list(shape.boundaries),
            "adapter": adapter_of(family),
        }
    return about | {"cells": cells, "seconds": round(time.perf_counter() - began, 1)}


def title_of(family: Any) -> str:
    if not family.is_multimodal:
        return family.shape.title
    return f"{json.loads((family.folder(0) / 'config.json').read_text('utf-8'))['architectures'][0]} (text part)"


def adapter_of(family: Any) -> str:
    """Returns what plan_training says of the adapter's layers."""
    from stillroom.errors import EngineError
    from stillroom.train.student.adapters import choose_targets, describe_adapter

    try:
        unsupported = choose_targets(family.student().module, None).unsupported
        notes = describe_adapter(family.student(4).module, unsupported)
    except EngineError as error:
        return str(error.problem)
    return (
        "; ".join(notes)
        .replace("the adapter is on ", "")
        .replace("; model.lora_targets=all-linear would train them", "")
    )


def page(kept: dict[str, Any]) -> str:
    families = kept["families"]
    whole = sum(
        all(cell["works"] for cell in family["cells"].values()) for family in families.values()
    )
    libraries = ", ".join(f"{name} {number}" for name, number in kept["libraries"].items())
    lines = [
        "# Families of models",
        "",
        "`make families` runs every cell of this page on a tiny model of each family (2 to 4 layers, random weights, fp32 on a CPU) and",
        f"writes the page. The last run was on {kept['on']} with {libraries}. In {whole} of {len(families)} rows, every cell is yes.",
        "",
        "Yes means that the operation completed (SFT with a falling loss, generation with tool calls) and matched plain transformers or peft,",
        "run on one unpadded sequence at a time:",
        "",
        f"- The loss is within {LOSS:.0e} (relative; DPO {DPO_LOSS:.0e}), and the gradient within {GRADIENT:.0e} of its largest value.",
        f"- Sampled tokens have the same log-probabilities to {LOGPROB:.0e} nats.",
        "- Greedy turns around tool replies match transformers' `generate`, except at ties. Its cache is off where its cached steps are inexact",
        "  (dynamic RoPE; the minimum time step of Nemotron-H and Zamba2).",
        f"- A checkpoint loads back unchanged. Exported weights give the checkpoint's logits to {WEIGHTS:.0e}, or to 1.5 times the error of weights",
        "  that were merged in float64 and rounded once (a model can amplify such rounding).",
        "",
        "Sequences are shorter than, as long as and longer than each boundary: the lengths in tokens at which the tiny model's window, chunk or",
        "original context ends. Each no is explained below. Real models of a family use the same code with larger dimensions; this page does not",
        "show how well they learn. Gemma 3n's multimodal checkpoint is missing, because plain transformers needs the package timm for it.",
        "",
        "| family | boundaries | " + " | ".join(COLUMNS) + " |",
        "|---|---|" + "---|" * len(COLUMNS),
    ]
    for family in families.values():
        cells = [family["cells"].get(title) for title in COLUMNS]
        said = [
            "not run" if cell is None else "yes" if cell["works"] else "**no**" for cell in cells
        ]
        edges = ", ".join(str(edge) for edge in family["boundaries"]) or "none"
        lines.append(f"| {family['title']} | {edges} | " + " | ".join(said) + " |")
    if missing := [name for name in names() if name not in families]:
        lines += ["", f"Not run since the table last changed: {', '.join(missing)}."]
    lines += ["", "## Failing cells", ""]
    refused = [
        f"- {family['title']}, {title}: {cell['why']}"
        for family in families.values()
        for title, cell in family["cells"].items()
        if not cell["works"]
    ]
    lines += refused or ["None."]
    lines += [
        "",
        "## Largest differences in passing cells",
        "",
        "| cell | figure | largest | in |",
        "|---|---|---|---|",
    ]
    for title in COLUMNS:
        for figure in ("loss", "gradient", "reload", "sampler", "sampled", "logits"):
            found = [
                (cell["figures"][figure], family["title"])
                for family in families.values()
                if (cell := family["cells"].get(title))
                and cell["works"]
                and figure in cell["figures"]
            ]
            if found:
                value, where = max(found)
                lines.append(f"| {title} | {figure} | {value:.1e} | {where} |")
    lines += [
        "",
        "## The layers of a LoRA adapter",
        "",
        "What `plan_training` reports for the tiny model with `model.lora_targets: auto`, the default.",
        "",
        "| family | the adapter is on |",
        "|---|---|",
        *(f"| {family['title']} | {family['adapter']} |" for family in families.values()),
    ]
    return "\n".join(lines) + "\n"


def turned(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Returns the cells that said yes and say no now."""
    return [
        f"{name}, {title}: {cell['why']}"
        for name, family in after.items()
        for title, cell in family["cells"].items()
        if not cell["works"] and before.get(name, {}).get("cells", {}).get(title, {}).get("works")
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="families by their names in tests/fakes")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--page-only", action="store_true")
    parser.add_argument("--loud", action="store_true", help="print tracebacks")
    parser.add_argument("--no-page", action="store_true", help="only print the cells")
    options = parser.parse_args()
    kept = json.loads(FIGURES.read_text("utf-8")) if FIGURES.exists() else {"families": {}}
    if options.page_only:
        PAGE.write_text(page(kept), encoding="utf-8")
        return 0
    # Before torch is imported.
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    order = {name: i for i, name in enumerate(names())}
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    now, bad = digest(), list[str]()
    for name in options.only or order:
        earlier = kept["families"].get(name, {})
        if earlier.get("digest") == now and not options.again:
            continue
        found = measure(name, loud=options.loud) | {"digest": now}
        cells = found["cells"].items()
        no = [f"{title}: {cell['why']}" for title, cell in cells if not cell["works"]]
        print(json.dumps({"family": name, "seconds": found["seconds"], "no": no}), flush=True)
        bad += turned(kept["families"], {name: found})
        if options.no_page:
            continue
        kept["families"][name] = found
        kept["families"] = dict(
            sorted(kept["families"].items(), key=lambda item: order.get(item[0], 999))
        )
        kept |= {
            "on": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "libraries": {library: version(library) for library in LIBRARIES},
        }
        FIGURES.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(kept), encoding="utf-8")
    whole = sum(
        all(cell["works"] for cell in family["cells"].values())
        for family in kept["families"].values()
    )
    for line in bad:
        print(f"said yes before: {line}", file=sys.stderr)
    if options.only is None and whole < AT_LEAST:
        print(f"{whole} families say yes in every cell, and {AT_LEAST} are wanted", file=sys.stderr)
        return 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
