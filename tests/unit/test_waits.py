"""No wait for a process, thread, queue, lock or socket lasts for ever.

A wait that must have no limit says why on its line: `# no limit: the reason`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.source_tree import ROOT, modules, tree_of

MAX_WITHOUT_LIMIT = 12
_REASON = re.compile(r"# no limit: \S+ ")
_WAITS = frozenset({"wait", "join", "get", "acquire"})
"""Methods of processes, threads, events, queues and locks that wait for ever without arguments."""
_RUNS = frozenset({"run", "call", "check_call", "check_output"})
_SOCKET_WAITS = frozenset({"accept", "recv"})
_NAMES = _WAITS | _RUNS | _SOCKET_WAITS | {"communicate", "flock", "select", "waitpid"}
_SOME_WAIT = re.compile(
    rf"\.({'|'.join(_WAITS)})\(\)|subprocess\.\w+\(|\.({'|'.join(_NAMES - _WAITS - _RUNS)})\("
)
"""What a file with something to find must hold: most hold none and need no tree."""


def waits_without_limit(tree: ast.Module) -> Iterator[int]:
    """Yields the line of each call that may wait for ever, which an awaited one may not: what
    started it can cancel it."""
    nodes = list(ast.walk(tree))
    calls = [
        node
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _NAMES
        and not _names_a_timeout(node)
    ]
    if not calls:
        return
    awaited = {id(part) for node in nodes if isinstance(node, ast.Await) for part in ast.walk(node)}
    limits_sockets, variables = _limits_sockets(nodes), set(_context_variables(nodes))
    for call in calls:
        if id(call) not in awaited and _waits(call, variables, limits_sockets=limits_sockets):
            yield call.lineno


def _waits(call: ast.Call, variables: set[str], *, limits_sockets: bool) -> bool:
    assert isinstance(call.func, ast.Attribute)
    owner, name = ast.unparse(call.func.value), call.func.attr
    given = " ".join(ast.unparse(argument) for argument in call.args)
    if name in _WAITS:
        return not call.args and not call.keywords and owner not in variables
    if name in _RUNS:
        return owner == "subprocess"
    if name in _SOCKET_WAITS:
        return "DONTWAIT" not in given and not limits_sockets
    if name == "select":
        return owner == "select" and len(call.args) < 4
    if name == "waitpid":
        return "WNOHANG" not in given
    return name == "communicate" or ("LOCK_EX" in given and "LOCK_NB" not in given)


def _names_a_timeout(call: ast.Call) -> bool:
    return any(keyword.arg in ("timeout", None) for keyword in call.keywords)


def _context_variables(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        match node:
            case (
                ast.Assign(targets=[target], value=ast.Call(func=made))
                | ast.AnnAssign(target=target, value=ast.Call(func=made))
            ) if "ContextVar" in ast.unparse(made):
                yield ast.unparse(target)
            case _:
                pass


def _limits_sockets(nodes: list[ast.AST]) -> bool:
    """Returns whether a module's sockets have a limit, which is set once for each of them."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("settimeout", "setblocking"):
                return True
            if node.func.attr == "create_connection" and _names_a_timeout(node):
                return True
    return False


def own_files() -> list[Path]:
    """Returns the files of the engine, the server and the tests."""
    return [*modules().values(), *sorted((ROOT / "tests").rglob("*.py"))]


@pytest.mark.parametrize(
    "code",
    [
        "process.wait()",
        "thread.join()",
        "queue.get()",
        "lock.acquire()",
        "process.communicate(b'x')",
        "subprocess.run(['true'], check=True)",
        "select.select([a], [], [])",
        "os.waitpid(pid, 0)",
        "fcntl.flock(handle, fcntl.LOCK_EX)",
        "listener.accept()",
    ],
)
def test_a_wait_without_a_limit_is_found(code):
    assert list(waits_without_limit(ast.parse(code))) == [1]


@pytest.mark.parametrize(
    "code",
    [
        "process.wait(5)",
        "thread.join(timeout=5)",
        "', '.join(names)",
        "table.get(name)",
        "name = ContextVar('name')\nname.get()",
        "async def main(): await event.wait()",
        "async def main(): await asyncio.wait_for(event.wait(), 5)",
        "process.communicate(b'x', timeout=5)",
        "subprocess.run(['true'], timeout=5)",
        "select.select([a], [], [], 0.5)",
        "os.waitpid(pid, os.WNOHANG)",
        "fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "listener.settimeout(5)\nlistener.accept()",
    ],
)
def test_a_wait_with_a_limit_is_none(code):
    assert list(waits_without_limit(ast.parse(code))) == []


def test_each_wait_has_a_limit():
    found, num_reasons = list[str](), 0
    for path in own_files():
        text = path.read_text(encoding="utf-8")
        if not _SOME_WAIT.search(text):
            continue
        lines = text.splitlines()
        for number in waits_without_limit(tree_of(path)):
            if _REASON.search(lines[number - 1]):
                num_reasons += 1
            else:
                found.append(f"{path.relative_to(ROOT)}:{number}: {lines[number - 1].strip()}")
    assert found == []
    assert num_reasons <= MAX_WITHOUT_LIMIT
