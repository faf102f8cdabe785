# SPDX-License-Identifier: Apache-2.0
"""What stands in vLLM's place in unit tests: it answers every control request, without weights.

The file that STUB_SCRIPT names says how it misbehaves; it is read at every request, so that a test
can change its mind. `tests/scripted_engine.py` is the one that really generates.
"""

import argparse
import asyncio
import json
import os
import signal
from pathlib import Path

from aiohttp import web

KEEP: dict[str, int] = {"tokens": 0, "hanging": 0}


def script() -> dict:
    """Stage → what happens there: "die", "hang", "500"; and what the metrics say."""
    path = Path(os.environ["STUB_SCRIPT"])
    return json.loads(path.read_text()) if path.exists() else {}


async def answer(request: web.Request) -> web.Response:
    """Any request: misbehave as told, or be well."""
    stage = request.path.strip("/")
    match script().get(stage):
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            await asyncio.Event().wait()
        case "500":
            return web.Response(status=500, text=f"{stage} is broken")
    if stage == "metrics":
        running, grows = script().get("running", 0), script().get("grows", 1)
        KEEP["tokens"] += grows
        return web.Response(
            text="# HELP vllm:num_requests_running of it\n"
            f'vllm:num_requests_running{{model="policy",engine="0"}} {running}.0\n'
            f'vllm:generation_tokens_total{{engine="0"}} {KEEP["tokens"]}.0\n'
        )
    return web.json_response({"success": True, "world_size": 1})


def main() -> None:
    """Serve on `--uds` until a signal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds")
    arguments, _ = parser.parse_known_args()
    app = web.Application()
    app.router.add_route("*", "/{stage:.*}", answer)
    web.run_app(app, path=arguments.uds, print=lambda *_: None, shutdown_timeout=30)


if __name__ == "__main__":
    main()
