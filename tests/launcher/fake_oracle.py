"""Stands in for transformers: what becomes of it is the name of the directory it is told of."""

from __future__ import annotations

import os
import signal
import time

from unisono.launcher.verify.oracle_process import PROCESS, OracleAnswer, OracleFailed, OracleOrders
from unisono.workers.channel import Peer
from unisono.workers.orders import die_with_parent, read_orders
from unisono.workers.protocol import int32s

ENTRY = "tests.launcher.fake_oracle:main"


def main() -> None:
    orders, parent_pid = read_orders(OracleOrders)
    die_with_parent(parent_pid)
    with Peer(orders.endpoint, PROCESS, (), orders.session) as peer:
        match os.path.basename(orders.directory):
            case "fails":
                peer.send(OracleFailed(message="OSError: no\nsuch architecture"))
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hangs":
                time.sleep(100)
            case _:
                for index, ids in enumerate(orders.ids):
                    said = int32s([*orders.sequences[index], *ids])
                    peer.send(OracleAnswer(index=index, logprobs=said))
