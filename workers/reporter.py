"""What a rank tells of itself: phases, progress, and its own exception. Torch-free."""

from __future__ import annotations

import os
import socket
import traceback

from unisono.workers.channel import Peer
from unisono.workers.protocol import Fault, Hello, Progress


class Reporter:
    """Remembers where the rank is, so that a fault can say it."""

    def __init__(self, peer: Peer, rank: int) -> None:
        self._peer = peer
        self._rank = rank
        self.phase = "start"
        self.step = -1

    def hello(self, config_digest: str) -> None:
        """First message of a rank."""
        self._peer.send(
            Hello(
                rank=self._rank,
                pid=os.getpid(),
                host=socket.gethostname(),
                config_digest=config_digest,
            )
        )

    def enter(self, phase: str) -> None:
        """The rank begins `phase`; the launcher hears of it."""
        self.phase = phase
        self.progress(0, 0)

    def note(self, phase: str) -> None:
        """The rank is in `phase` from now on; told only if it fails."""
        self.phase = phase

    def progress(self, done: int, total: int) -> None:
        """`done` of `total` bytes of the present phase."""
        self._peer.send(Progress(rank=self._rank, phase=self.phase, done=done, total=total))

    def fault(self, error: BaseException, secondary: bool) -> None:
        """The rank ends by `error`; `secondary` if it only saw a peer go."""
        self._peer.send(
            Fault(
                rank=self._rank,
                phase=self.phase,
                step=self.step,
                error=type(error).__name__,
                message=str(error),
                traceback="".join(traceback.format_exception(error)),
                secondary=secondary,
            )
        )
