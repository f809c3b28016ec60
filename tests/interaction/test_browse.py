"""The tool `browse` with a real Chromium and a website on the loopback."""

import json
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.abc
import psutil
import pytest

from fakes.addresses import FORBIDDEN_HOSTS, SOME_FORBIDDEN_HOSTS
from fakes.browsing import TASK, a_setting, answer, call, fail, ref_of
from fakes.rooms import stay
from fakes.user_files import wait_for
from fakes.waiting import run_async
from fakes.websites import Request, Response, open_website
from stillroom.errors import InputError
from stillroom.tools.browser.addresses import IPAddress
from stillroom.tools.browser.proxy import Dial
from stillroom.tools.browser.tool import BrowseTools
from stillroom.tools.source import ToolResult

pytestmark = pytest.mark.browser


def open_room(url: str, _: str) -> tuple[str, dict[str, Any]]:
    return "browse_open", {"url": url}


def type_word(_: str, reply: str) -> tuple[str, dict[str, Any]]:
    return "browse_type", {"ref": ref_of(reply, "Word"), "text": "kettle", "submit": True}


def read(_: str, reply: str) -> tuple[str, dict[str, Any]]:
    return "browse_read", {}


def test_many_rollouts_browse_at_once_and_see_nothing_of_each_other(tmp_path: Path) -> None:
    steps = [open_room, type_word, read]

    run_async(lambda: stay(tmp_path, steps, browse=True), within_s=240).check()


class Trap:
    """A port of the loopback, by TCP and UDP and in both families, that nothing may reach."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.port = 0
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                try:
                    trap = self._stack.enter_context(socket.socket(family, kind))
                    trap.bind((host, self.port))
                except OSError:
                    # Without IPv6 nothing can get there either.
                    assert family == socket.AF_INET6
                    continue
                self.port = trap.getsockname()[1]
                trap.setblocking(False)
                if kind == socket.SOCK_STREAM:
                    trap.listen()
                self._sockets.append(trap)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def num_caught(self) -> int:
        caught = 0
        for trap in self._sockets:
            try:
                if trap.type == socket.SOCK_STREAM:
                    trap.accept()[0].close()
                else:
                    trap.recv(1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            caught += 1
        return caught


def test_forbidden_addresses_get_no_connection_from_the_address_line_or_a_redirect() -> None:
    async def body() -> None:
        dialled: set[tuple[str, int]] = set()
        with Trap() as trap:
            async with (
                a_setting(dial=noting(dialled)) as setting,
                setting.tools.session(TASK) as session,
            ):
                for host in FORBIDDEN_HOSTS:
                    url = f"http://{host}:{trap.port}/"
                    assert "error: " in await fail(session, "browse_open", url=url)
                assert setting.tools.proxy.num_dialled == 0
                # A browser may take a spelling for no URL and stay where it is, with a reply.
                for n, host in enumerate(SOME_FORBIDDEN_HOSTS):
                    to = f"{'https' if n % 3 == 0 else 'http'}://{quote(host)}:{trap.port}/"
                    url = setting.url(f"/redirect?to={to}")
                    await session.call("browse_open", {"url": url})
                assert dialled == {("127.0.0.1", setting.site.port)}
                assert setting.tools.proxy.num_blocked > len(SOME_FORBIDDEN_HOSTS) / 2
            assert trap.num_caught == 0

    run_async(body, within_s=240)


def noting(dialled: set[tuple[str, int]]) -> Dial:
    """Dials as ever, and notes each address before anything is sent to it."""

    async def dial(address: IPAddress, port: int) -> anyio.abc.ByteStream:
        dialled.add((str(address), port))
        return await anyio.connect_tcp(str(address), port)

    return dial


def quote(host: str) -> str:
    return "".join(f"%{byte:02x}" for byte in host.encode())


REQUESTS = """<title>asking</title><body><p id=end>asking</p><script>
const hosts = %s, framed = %s, port = %d, from = location.origin, asked = [];
const rest = (promise) => asked.push(Promise.race(
  [promise.catch(() => 0), new Promise(done => setTimeout(done, 5000))]));
for (const host of hosts) {
  for (const scheme of ['http', 'https']) {
    const url = scheme + '://' + host + ':' + port + '/';
    const redirect = from + '/redirect?to=' + encodeURIComponent(url);
    rest(fetch(url, {mode: 'no-cors'}));
    rest(fetch(redirect, {mode: 'no-cors'}));
    try { navigator.sendBeacon(url, 'x') } catch {}
  }
  const link = document.head.appendChild(document.createElement('link'));
  link.rel = 'preconnect'; link.href = 'http://' + host + ':' + port;
  try {
    const ws = new WebSocket('ws://' + host + ':' + port + '/');
    rest(new Promise(done => { ws.onclose = done }));
  } catch {}
}
for (const host of framed) {
  const frame = document.body.appendChild(document.createElement('iframe'));
  frame.src = 'http://' + host + ':' + port + '/';
}
try {
  const peer = new RTCPeerConnection({iceServers: [
    {urls: 'stun:127.0.0.1:' + port}, {urls: 'stun:localhost:' + port},
    {urls: 'turn:127.0.0.1:' + port + '?transport=tcp', username: 'x', credential: 'y'}]});
  peer.createDataChannel('x');
  rest(peer.createOffer().then(offer => peer.setLocalDescription(offer)));
} catch {}
try { rest(new WebTransport('https://127.0.0.1:' + port + '/').ready) } catch {}
Promise.all(asked).then(() => { document.getElementById('end').textContent = 'all asked' });
</script>"""


def test_forbidden_addresses_get_no_connection_from_scripts_frames_and_sockets() -> None:
    async def body() -> None:
        dialled: set[tuple[str, int]] = set()
        with Trap() as trap:

            def respond(request: Request) -> Response:
                if request.path == "/redirect":
                    return answer(request)
                hosts, framed = json.dumps(FORBIDDEN_HOSTS), json.dumps(SOME_FORBIDDEN_HOSTS)
                return Response(REQUESTS % (hosts, framed, trap.port))

            async with (
                a_setting(respond, dial=noting(dialled)) as setting,
                setting.tools.session(TASK) as session,
            ):
                content = await call(session, "browse_open", url=setting.url())
                while "all asked" not in content:
                    content = await call(session, "browse_read")
                assert setting.tools.proxy.num_blocked > len(FORBIDDEN_HOSTS)
                assert dialled == {("127.0.0.1", setting.site.port)}
            assert trap.num_caught == 0

    run_async(body, within_s=240)


def test_page_that_hangs_costs_only_its_own_session() -> None:
    async def body() -> None:
        options = {"nav_timeout_s": 1.0, "call_timeout_s": 4.0}
        async with a_setting(**options) as setting:
            tools = setting.tools
            async with tools.session(TASK) as one, tools.session(TASK) as other:
                url = setting.url("/cookie?set=other")
                await call(other, "browse_open", url=url)
                content = await fail(one, "browse_open", url=setting.url("/never"))
                assert "the page timed out after 1 s" in content
                await fail(one, "browse_open", url=setting.url("/loop"))
                content = await fail(one, "browse_read")
                assert "timed out after 4 s" in content
                assert "lost" in content
                assert "begin with browse_open" in await fail(one, "browse_read")
                assert "# Kettles" in await call(one, "browse_open", url=setting.url())
                content = await call(other, "browse_open", url=setting.url("/cookie"))
                assert "who=other" in content

    run_async(body, within_s=240)


def browser_processes() -> list[psutil.Process]:
    """The browser's own processes, below this one; not those of its renderers and the like."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        try:
            is_main = "--remote-debugging-pipe" in process.cmdline()
        except psutil.Error:
            continue
        if is_main and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def test_browser_that_was_killed_is_started_again_and_the_loss_is_told() -> None:
    async def body() -> None:
        async with a_setting() as setting, setting.tools.session(TASK) as session:
            await call(session, "browse_open", url=setting.url())
            kill_browser()
            content = await fail(session, "browse_read")
            assert "crashed" in content
            assert "lost" in content
            assert "begin with browse_open" in await fail(session, "browse_click", ref=1)
            assert "# Kettles" in await call(session, "browse_open", url=setting.url())

            async def read_on() -> ToolResult:
                return await session.call("browse_open", {"url": setting.url("/never")})

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(expect_crash, read_on)
                await wait_for(lambda: setting.site.requests[-1].path == "/never")
                kill_browser()
            assert "# Kettles" in await call(session, "browse_open", url=setting.url())

    run_async(body, within_s=240)


async def expect_crash(ask: Callable[[], Any]) -> None:
    result = await ask()
    assert result.is_error
    assert "crashed" in result.content


def kill_browser() -> None:
    for process in browser_processes():
        process.kill()


@pytest.mark.parametrize("ending", ["exit", "error", "cancel", "hang"])
def test_nothing_is_left_behind(ending: str) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}

    async def body() -> None:
        async with open_website(answer) as site:
            tools = BrowseTools(allow=[f"127.0.0.1:{site.port}"])
            with anyio.CancelScope() as scope:
                async with tools, tools.session(TASK) as session:
                    await call(session, "browse_open", url=site.origin)
                    started.update(psutil.Process().children(recursive=True))
                    if ending == "error":
                        raise ZeroDivisionError
                    if ending == "cancel":
                        scope.cancel()
                        await call(session, "browse_open", url=site.origin)
                    if ending == "hang":
                        for process in browser_processes():
                            process.suspend()

    started: set[psutil.Process] = set()
    if ending == "error":
        with pytest.raises(ZeroDivisionError):
            run_async(raising_alone(body), within_s=240)
    else:
        run_async(body, within_s=240)
    assert len(started) > 3
    left = [p for p in started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert [process for process in left if process.pid not in before] == []


def raising_alone(body: Callable[[], Any]) -> Callable[[], Any]:
    """The body with its own error, which the website's task group had wrapped."""

    async def run() -> None:
        try:
            await body()
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    return run


def test_browser_that_does_not_start_is_told_before_any_call() -> None:
    async def body() -> None:
        with pytest.raises(InputError, match="failed to start"):
            async with BrowseTools(executable=Path("/bin/false")):
                pass
        with pytest.raises(InputError, match="is not a valid entry"):
            BrowseTools(allow=["*"])

    run_async(body, within_s=240)
