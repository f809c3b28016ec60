"""What `stillroom record` would be on aiohttp: a server and a client of it that pass blocks on, with no journal at all.

It exists to be measured beside ours (streams.py --peer). Prints {"recording": …} as ours does.
"""

import asyncio
import json
import sys

import uvloop
from aiohttp import ClientSession, TCPConnector, web


async def serve(upstream: str) -> None:
    session = ClientSession(
        connector=TCPConnector(limit=0), auto_decompress=False, read_bufsize=1 << 18
    )

    async def passed(request: web.Request) -> web.StreamResponse:
        data = await request.read()
        async with session.post(
            upstream + request.path_qs, data=data, headers={"content-type": "application/json"}
        ) as reply:
            answer = web.StreamResponse(
                status=reply.status, headers={"content-type": reply.headers["content-type"]}
            )
            await answer.prepare(request)
            async for block in reply.content.iter_any():
                await answer.write(block)
            await answer.write_eof()
            return answer

    app = web.Application()
    app.router.add_post("/{path:.*}", passed)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    print(json.dumps({"recording": f"http://127.0.0.1:{port}"}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
