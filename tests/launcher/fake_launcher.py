"""A launcher with fake ranks, run as a program of its own so that tests can kill it."""

from __future__ import annotations

import sys

from tests.launcher.fake_processes import config, fake_table
from unisono.launcher.engine_client import Engine
from unisono.runtime.protocol import EngineError


def main() -> int:
    """Start, say so on stdout, and idle. Ends like the command line does."""
    try:
        with Engine(config(2), table=fake_table) as engine:
            print("starting", flush=True)
            engine.start(lambda news: print(news.phase, flush=True))
            print("ready", flush=True)
            while True:
                engine.poll(10.0)
    except KeyboardInterrupt:
        return 130
    except EngineError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
