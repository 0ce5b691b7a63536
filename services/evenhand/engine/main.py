"""``evenhand engine``: one simulated engine as a process.

Prints one JSON line with its addresses when it is ready, then serves until SIGTERM or SIGINT.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Sequence

from evenhand.core.errors import EvenhandError
from evenhand.engine.config import EngineConfig, parse_arguments
from evenhand.engine.server import EngineServer
from evenhand.logs import configure_logs, get_logger


async def run_engine(config: EngineConfig) -> None:
    """Serve until a signal asks to stop. InvalidConfig if a port is taken."""
    log = get_logger("engine")
    server = EngineServer(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await server.start()
    try:
        print(json.dumps({"event": "ready", **server.addresses()}), flush=True)
        log.info("engine ready", **server.addresses())
        await stop.wait()
    finally:
        await server.stop()
    log.info("engine stopped", name=config.name)


def main(argv: Sequence[str] | None = None) -> int:
    """The command's entry. 0 after a clean stop; InvalidConfig reaches the caller as one sentence."""
    config = parse_arguments(sys.argv[1:] if argv is None else argv)
    configure_logs("engine")
    asyncio.run(run_engine(config))
    return 0


def run_module() -> int:
    """``python -m evenhand.engine``: as ``main``, with a fault as one sentence on standard error."""
    try:
        return main()
    except EvenhandError as error:
        print(f"evenhand engine: {error}", file=sys.stderr)
        return 1
