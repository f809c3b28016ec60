"""Hostile chat templates: does one run code, hang a call, or take the machine's memory? templates.py

Each is the template of a model whose rows `inspect_examples` renders. Those that want to run code would leave a file; those that never
end are ended with their process; those that grow without end are refused at the limit of memory.
"""

import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from scenes import report, workspace

from fakes.rollout_rows import rollout_row, write_rows
from stillroom import api
from stillroom.demo import DEMO_MODELS
from stillroom.errors import EngineError
from stillroom.settings import Workspace

AT_ONCE, DEADLINE_S, MAX_BYTES = 4, 75.0, 4 << 30
TOUCH = "__import__('os').system('touch {mark}')"
POPEN = "os.popen('touch {mark}').read()"
CODE = {
    "subclasses": "{{{{ ''.__class__.__mro__[1].__subclasses__()[80].__init__.__globals__ }}}}",
    "cycler": "{{{{ cycler.__init__.__globals__." + POPEN + " }}}}",
    "joiner": "{{{{ joiner.__init__.__globals__." + POPEN + " }}}}",
    "namespace": "{{{{ namespace.__init__.__globals__." + POPEN + " }}}}",
    "lipsum": "{{{{ lipsum.__globals__['os'].popen('touch {mark}').read() }}}}",
    "self": "{{{{ self._TemplateReference__context.cycler.__init__.__globals__." + POPEN + " }}}}",
    "attr filter": "{{{{ (''|attr('__class__')|attr('__mro__'))[1]|attr('__subclasses__')() }}}}",
    "raise_exception": "{{{{ raise_exception.__globals__['__builtins__']['eval'](\"" + TOUCH + "\") }}}}",
    "strftime_now": "{{{{ strftime_now.__globals__['__builtins__']['eval'](\"" + TOUCH + "\") }}}}",
    "format": "{{{{ '{{0.__class__.__init__.__globals__}}'.format(namespace) }}}}",
    "format_map": "{{{{ '{{a.__globals__}}'.format_map({{'a': raise_exception}}) }}}}",
    "map": "{{{{ ['touch {mark}']|map('os.system')|list }}}}",
    "generator": "{{{{ (messages|map('upper')).gi_frame.f_back.f_globals }}}}",
    "include": "{{% include '/etc/passwd' %}}",
    "import": "{{% import 'os' as os %}}{{{{ " + POPEN + " }}}}",
    "extends": "{{% extends '/etc/passwd' %}}",
    "mutation": "{{{{ messages.clear() }}}}{{{{ messages.__init__.__globals__ }}}}",
}  # fmt: skip
ENDLESS = {
    "loops": "{{% for a in range(99999) %}}{{% for b in range(99999) %}}{{% endfor %}}{{% endfor %}}",
    "macro": "{{% macro m(n) %}}{{{{ m(n) }}}}{{{{ m(n) }}}}{{% endmacro %}}{{{{ m(1) }}}}",
    "power": "{{{{ 9 ** 9 ** 9 }}}}",
    "sort": "{{% for a in range(99999) %}}{{{{ range(99999)|list|sort|length }}}}{{% endfor %}}",
}
GROWING = {
    "product": "{{{{ 'a' * 4000000000 }}}}",
    "center": "{{{{ 'a'|center(4000000000) }}}}",
    "width": "{{{{ '%4000000000d' % 1 }}}}",
    "list": "{{{{ ([0] * 99999999) * 99 }}}}",
    "doubling": "{{% set ns = namespace(t='aaaaaaaa') %}}{{% for i in range(40) %}}{{% set ns.t = ns.t ~ ns.t %}}{{% endfor %}}{{{{ ns.t }}}}",
}  # fmt: skip
CONTENT = "{{% for m in messages %}}{{{{ m['content'] }}}}{{% endfor %}}"


class MostMemory:
    """The most memory that one child of this process has held, looked at ten times a second."""

    def __init__(self) -> None:
        self.most_bytes, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.1):
            for child in psutil.Process().children(recursive=True):
                try:
                    self.most_bytes = max(self.most_bytes, child.memory_info().rss)
                except psutil.Error:
                    continue

    def end(self) -> int:
        self._ended.set()
        self._thread.join(60)
        return self.most_bytes


def shown(root: Path, name: str, template: str, mark: Path) -> tuple[str, float, str]:
    """Returns a template's name, the seconds that the call took, and what it answered."""
    model = root / f"model-{name.replace(' ', '-')}"
    shutil.copytree(next(iter(DEMO_MODELS.values())), model)
    (model / "chat_template.jinja").write_text(template.format(mark=mark), encoding="utf-8")
    started = time.monotonic()
    try:
        request = api.InspectExamples(path="rollouts.jsonl", model=model.name)
        page = api.inspect_examples(Workspace(root), request)
        answer = " ".join(str(one.problem or one.text) for one in page.examples)
    except EngineError as error:
        answer = f"refused: {error}"
    return name, time.monotonic() - started, answer


def main() -> int:
    kinds = {"code": CODE, "endless": ENDLESS, "growing": GROWING}
    with workspace() as space:
        root = space.root
        write_rows(root / "rollouts.jsonl", [rollout_row()])
        marks = root / "marks"
        marks.mkdir()
        _, _, harmless = shown(root, "harmless", CONTENT, marks / "none")
        memory = MostMemory()
        templates = {name: text for kind in kinds.values() for name, text in kind.items()}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            calls = [
                pool.submit(shown, root, name, text, marks / name.replace(" ", "_"))
                for name, text in templates.items()
            ]
            answers = [call.result() for call in calls]
        most_bytes = memory.end()
        ran = sorted(path.name for path in marks.iterdir())
        left = [child.pid for child in psutil.Process().children(recursive=True)]
    slow = [name for name, seconds, _ in answers if seconds > DEADLINE_S]
    # The words of the interpreter's own objects would show that a template has reached them.
    reached = [
        name for name, _, answer in answers if name in CODE and ("<module" in answer or "root:x:" in answer)
    ]  # fmt: skip
    unrefused = [n for n, _, answer in answers if n in GROWING and len(answer) > 1_000_000]
    passed = not (ran or slow or reached or unrefused or left or "refused" in harmless)
    counts = ", ".join(f"{len(kind)} {name}" for name, kind in kinds.items())
    figure = (
        f"{len(templates)} templates ({counts}): {len(ran) + len(reached)} ran code or read files, {len(slow)} "
        f"hung, {len(left)} processes left; slowest call {max(s for _, s, _ in answers):.0f} s, most memory of a "
        f"process {most_bytes / 1e9:.1f} GB"
    )
    return report(
        23, figure, passed and most_bytes < MAX_BYTES, ran=ran, slow=slow, reached=reached, left=left,
        answers={name: answer[:120] for name, _, answer in answers},
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
