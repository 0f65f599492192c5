"""Numbered, typed messages between processes over ZeroMQ. Torch-free.

A `Hub` (ROUTER) binds and speaks to many; a `Peer` (DEALER) connects and has a name. A message is
a multipart of [header][body][one raw frame per array], see `workers/codec.py`. Each side counts
what it sends to the other; a gap, a foreign session or anything malformed is a ProtocolError that
names the peer, and ends the session.

None of this is safe to use from two threads.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import zmq

from unisono.models.config import ConfigError
from unisono.workers.codec import (
    VERSION,
    ProtocolError,
    decode_header,
    decode_message,
    encode_message,
    from_json,
    from_plain,
    to_json,
    to_plain,
)

__all__ = [
    "CurveKeys",
    "Hub",
    "Peer",
    "ProtocolError",
    "decode_header",
    "decode_message",
    "encode_message",
    "from_json",
    "from_plain",
    "to_json",
    "to_plain",
    "wait_readable",
]

HIGH_WATER_MARK = 1 << 20
"""Messages queued for one peer: more than every token of many long answers."""
LINGER_MS = 500
"""Longest that close waits for messages on their way out."""
AWAIT_PEER_S = 5.0
"""Longest that the first message to a peer waits for it to connect."""
RECONNECT_MS = 20
"""A peer may start before its hub listens; the default of 100 ms would show at start-up."""
_LOOPBACK = ("127.", "localhost:", "[::1]:")


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """Key pair of a hub in Z85 text, for tcp:// endpoints.

    Peers get `public_only()`. It is handed over in private: who does not hold it cannot complete
    the handshake, so it is what admits a peer.
    """

    public: str
    secret: str | None = None

    @classmethod
    def generate(cls) -> CurveKeys:
        public, secret = zmq.curve_keypair()
        return cls(public=public.decode(), secret=secret.decode())

    def public_only(self) -> CurveKeys:
        return CurveKeys(public=self.public)


class Hub:
    """The side that binds. Peers are known by the names they connect with.

    `incoming`: the types a peer may send. `fd`: a listening socket to take over instead of binding
    one, so that its port was known before. Raises ConfigError for tcp beyond loopback without keys.
    """

    def __init__(
        self,
        endpoint: str,
        incoming: Sequence[type],
        session: str,
        curve: CurveKeys | None = None,
        fd: int | None = None,
    ) -> None:
        _check_endpoint(endpoint, curve)
        self._session = session
        self._incoming = {cls.__name__: cls for cls in incoming}
        self._received: dict[str, int] = {}
        self._sent: dict[str, int] = {}
        self._link = _Link(zmq.ROUTER)
        try:
            socket = self._link.socket
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if curve is not None:
                assert curve.secret is not None, "a hub needs the secret key"
                socket.curve_server = True
                socket.curve_secretkey = curve.secret.encode()
            if fd is not None:
                socket.setsockopt(zmq.USE_FD, fd)
            self._link.open(endpoint, bind=True)
        except BaseException:
            self._link.close()
            raise

    @property
    def endpoint(self) -> str:
        """Where peers connect, with the port in place of a wildcard."""
        bound = self._link.socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return bound.rstrip(b"\0").decode()

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self._link.socket

    def peers(self) -> tuple[str, ...]:
        """Names of the peers that have spoken or were spoken to, sorted."""
        return tuple(sorted(self._received.keys() | self._sent.keys()))

    def send(self, peer: str, message: object) -> None:
        """Queue a message for `peer`.

        A peer never heard of is awaited for a few seconds. Raises ProtocolError if it is not
        connected (any more) or does not read.
        """
        sequence = self._sent.get(peer, 0)
        frames = [peer.encode(), *_encode(message, self._session, sequence, peer)]
        deadline = time.monotonic() + (0.0 if peer in self.peers() else AWAIT_PEER_S)
        while not self._link.send(frames, peer):
            if time.monotonic() >= deadline:
                raise ProtocolError(f"peer {peer!r} is not connected")
            time.sleep(0.002)
        self._sent[peer] = sequence + 1

    def receive(self, timeout_s: float | None) -> tuple[str, Any] | None:
        """Return the next message and who sent it; None after `timeout_s` (None: wait for ever).

        Raises ProtocolError.
        """
        frames = self._link.receive(timeout_s)
        if frames is None:
            return None
        peer = _name(frames[0])
        expected = self._received.get(peer, 0)
        message = _decode(frames[1:], self._incoming, self._session, expected, peer)
        self._received[peer] = expected + 1
        return peer, message

    def close(self) -> None:
        """Send what is queued, for at most LINGER_MS, and close. May be called again."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Peer:
    """The side that connects, under the name `identity`; the hub may appear later.

    `incoming`: the types the hub may send. Raises ConfigError for tcp beyond loopback without keys.
    """

    def __init__(
        self,
        endpoint: str,
        identity: str,
        incoming: Sequence[type],
        session: str,
        curve: CurveKeys | None = None,
    ) -> None:
        _check_endpoint(endpoint, curve)
        self._session = session
        self._incoming = {cls.__name__: cls for cls in incoming}
        self._received = 0
        self._sent = 0
        self._link = _Link(zmq.DEALER)
        try:
            socket = self._link.socket
            socket.setsockopt(zmq.IDENTITY, identity.encode())
            socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
            if curve is not None:
                socket.curve_serverkey = curve.public.encode()
                socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            self._link.open(endpoint, bind=False)
        except BaseException:
            self._link.close()
            raise

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self._link.socket

    def send(self, message: object) -> None:
        """Queue a message for the hub. Raises ProtocolError if the hub does not read."""
        if not self._link.send(_encode(message, self._session, self._sent, "hub"), "hub"):
            raise ProtocolError("the hub is not connected")
        self._sent += 1

    def receive(self, timeout_s: float | None) -> Any | None:
        """Return the hub's next message; None after `timeout_s` (None: wait for ever).

        Raises ProtocolError.
        """
        frames = self._link.receive(timeout_s)
        if frames is None:
            return None
        message = _decode(frames, self._incoming, self._session, self._received, "hub")
        self._received += 1
        return message

    def close(self) -> None:
        """Send what is queued, for at most LINGER_MS, and close. May be called again."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wait_readable(channels: Sequence[Hub | Peer], timeout_s: float | None) -> list[Hub | Peer]:
    """Return those of `channels` with a message to receive; [] after `timeout_s`."""
    poller = zmq.Poller()
    for channel in channels:
        poller.register(channel.socket, zmq.POLLIN)
    readable = {socket for socket, _ in poller.poll(_milliseconds(timeout_s))}
    return [channel for channel in channels if channel.socket in readable]


class _Link:
    """A socket and its context; frames in, frames out."""

    def __init__(self, kind: int) -> None:
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._limit = -1
        """Milliseconds that the socket waits for a message."""
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)

    def open(self, endpoint: str, *, bind: bool) -> None:
        if "[" in endpoint:
            self.socket.setsockopt(zmq.IPV6, 1)
        try:
            (self.socket.bind if bind else self.socket.connect)(endpoint)
        except zmq.ZMQError as error:
            verb = "listen on" if bind else "connect to"
            raise ConfigError(f"cannot {verb} {endpoint}: {error}") from None

    def send(self, frames: list[bytes], peer: str) -> bool:
        """Queue `frames`; False if there is no such peer."""
        try:
            self.socket.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            raise ProtocolError(f"peer {peer!r} reads nothing: its queue is full") from None
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise ProtocolError(f"peer {peer!r}: {error}") from None
        return True

    def receive(self, timeout_s: float | None) -> list[bytes] | None:
        limit = -1 if timeout_s is None else math.ceil(max(timeout_s, 0.0) * 1000)
        if limit != self._limit:
            self.socket.setsockopt(zmq.RCVTIMEO, limit)
            self._limit = limit
        try:
            return self.socket.recv_multipart()
        except zmq.Again:
            return None

    def close(self) -> None:
        self.socket.close()
        # Terminating waits for the library's own threads, with no limit of its own: it was seen,
        # rarely, not to return after a signal. Nobody may wait for it longer than for a message.
        ending = threading.Thread(target=self._context.term, name="zmq-term", daemon=True)
        ending.start()
        ending.join(2 * LINGER_MS / 1000)


def _milliseconds(timeout_s: float | None) -> int | None:
    return None if timeout_s is None else math.ceil(max(timeout_s, 0.0) * 1000)


def _check_endpoint(endpoint: str, curve: CurveKeys | None) -> None:
    kind, _, address = endpoint.partition("://")
    if kind not in ("ipc", "tcp") or not address:
        raise ConfigError(f"endpoint {endpoint!r}: choose ipc://PATH or tcp://HOST:PORT")
    if kind == "tcp" and curve is None and not address.startswith(_LOOPBACK):
        raise ConfigError(f"endpoint {endpoint!r}: tcp beyond loopback needs CURVE keys")


def _name(identity: bytes) -> str:
    try:
        return identity.decode()
    except UnicodeDecodeError:
        raise ProtocolError(f"peer {identity!r}: its name is not UTF-8") from None


def _encode(message: object, session: str, sequence: int, peer: str) -> list[bytes]:
    try:
        return encode_message(message, session, sequence)
    except ProtocolError as error:
        raise ProtocolError(f"to peer {peer!r}: {error}") from None


def _decode(
    frames: list[bytes], incoming: dict[str, type], session: str, expected: int, peer: str
) -> Any:
    try:
        header = decode_header(frames)
        if header.version != VERSION:
            raise ProtocolError(f"protocol version {header.version}, not {VERSION}")
        if header.session != session:
            raise ProtocolError("a message of another session")
        if header.sequence != expected:
            raise ProtocolError(f"message {header.sequence} where {expected} was due")
        if header.type_name not in incoming:
            known = ", ".join(sorted(incoming))
            raise ProtocolError(f"type {header.type_name[:60]!r} is none of {known}")
        return decode_message(header, frames, incoming[header.type_name])
    except ProtocolError as error:
        raise ProtocolError(f"from peer {peer!r}: {error}") from None
