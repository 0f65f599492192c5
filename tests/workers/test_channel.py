"""The wire: every message survives it, and nothing that is not one is taken for one."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
import typing
import uuid
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgpack
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unisono.launcher.config import LaunchConfig
from unisono.models.config import ConfigError, ModelConfig, RopeConfig
from unisono.runtime.config import RuntimeConfig, RuntimeOrders
from unisono.runtime.protocol import CLIENT_MESSAGES, ENGINE_EVENTS, Finished
from unisono.workers import channel
from unisono.workers.channel import (
    CurveKeys,
    Hub,
    Peer,
    ProtocolError,
    from_json,
    from_plain,
    to_json,
    to_plain,
    wait_readable,
)
from unisono.workers.codec import VERSION, decode_header, decode_message, encode_message
from unisono.workers.config import WorkerConfig
from unisono.workers.orders import WorkerOrders
from unisono.workers.protocol import (
    WORKER_COMMANDS,
    WORKER_REPORTS,
    Fault,
    Progress,
    Rows,
    Shutdown,
    StepPlan,
    StepResult,
    int32s,
)

MESSAGES = (*WORKER_COMMANDS, *WORKER_REPORTS, *CLIENT_MESSAGES, *ENGINE_EVENTS)
CONFIGS = (RopeConfig, ModelConfig, WorkerConfig, RuntimeConfig, LaunchConfig)
ORDERS = (WorkerOrders, RuntimeOrders)
SESSION = "a session"


@dataclass(frozen=True)
class Inner:
    marks: array[int]
    size: int


@dataclass(frozen=True)
class Everything:
    """Each kind of field, arrays in every kind of container."""

    flag: bool
    ratio: float
    name: str | None
    kind: Literal["small", 7]
    first: array[int]
    pair: tuple[int, str]
    many: tuple[Inner, ...]
    maybe: Inner | None
    last: array[int]


RANGES = {"i": 31, "b": 7, "q": 63}
STRATEGIES: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(st.characters(exclude_categories=()), max_size=20),
}
ARRAYS = st.sampled_from(sorted(RANGES)).flatmap(
    lambda code: st.lists(st.integers(-(2 ** RANGES[code]), 2 ** RANGES[code] - 1), max_size=6).map(
        lambda values: array(code, values)
    )
)


def instances(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type hint, built without the code under test."""
    if hint in STRATEGIES:
        return STRATEGIES[hint]
    if dataclasses.is_dataclass(hint):
        names = {field.name: field.type for field in dataclasses.fields(hint)}
        hints = {name: _evaluate(text, hint) for name, text in names.items()}
        return st.builds(hint, **{name: instances(kind) for name, kind in hints.items()})
    if hint is array:
        return ARRAYS
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return st.sampled_from(arguments)
    if typing.get_origin(hint) is tuple:
        if arguments[-1] is Ellipsis:
            return st.lists(instances(arguments[0]), max_size=3).map(tuple)
        return st.tuples(*map(instances, arguments))
    [inner] = [argument for argument in arguments if argument is not type(None)]
    return st.none() | instances(inner)


def _evaluate(text: Any, cls: type) -> Any:
    module = __import__(cls.__module__, fromlist=["*"])
    # Before Python 3.12 an array takes no item type.
    return eval(text.replace("array[int]", "array"), vars(module))


def frames_of(message: object, sequence: int = 0) -> list[bytes]:
    return encode_message(message, SESSION, sequence)


def read(frames: list[bytes], cls: type) -> Any:
    return decode_message(decode_header(frames), frames, cls)


@pytest.mark.parametrize(
    "cls", [*MESSAGES, *CONFIGS, *ORDERS, Everything], ids=lambda c: c.__name__
)
@given(data=st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
def test_everything_survives_the_wire_and_json(cls, data):
    value = data.draw(instances(cls))
    read_back = read(frames_of(value), cls)
    assert read_back == value
    assert type(read_back) is cls
    assert from_json(cls, to_json(value)) == value
    assert "\n" not in to_json(value)


def test_arrays_keep_their_type_and_travel_raw():
    message = StepResult(rank=0, step=1, tokens=array("q", [1, -2]), digest=2**64 - 1, seconds=1)
    header, body, raw = frames_of(message)
    assert raw == (1).to_bytes(8, "little") + (-2).to_bytes(8, "little", signed=True)
    assert msgpack.unpackb(header) == [VERSION, SESSION, 0, "StepResult", "q"]
    assert msgpack.unpackb(body)["tokens"] == 2
    assert read([header, body, raw], StepResult).tokens.typecode == "q"


def test_a_step_without_log_probabilities_has_no_frame_for_them():
    """Nothing is sent that nobody asked for; with them there is one frame more, raw."""
    plain = StepResult(rank=0, step=1, tokens=array("i", [7]), digest=1, seconds=1)
    assert len(frames_of(plain)) == 3
    asked = dataclasses.replace(plain, logprobs=array("i", [-1, 1]))
    assert frames_of(asked)[3:] == [(-1).to_bytes(4, "little", signed=True) + b"\1\0\0\0"]


def test_an_empty_array_keeps_its_type_and_takes_no_frame():
    message = StepResult(rank=0, step=1, tokens=array("Q"), digest=0, seconds=1)
    header, body = frames_of(message)
    assert read([header, body], StepResult).tokens.typecode == "Q"
    for wrong in ("", "f", "qq"):
        fields = msgpack.unpackb(body) | {"tokens": wrong}
        with pytest.raises(ProtocolError, match=r"StepResult\.tokens: "):
            read([header, msgpack.packb(fields)], StepResult)


def test_an_int_is_welcome_where_a_float_is_due():
    assert to_plain(Finished(**_finished(), total_s=3))["total_s"] == 3.0


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"name": 1}, "Everything.name: wants str, got int 1"),
        ({"flag": 1}, "Everything.flag: wants bool"),
        ({"ratio": "1"}, "Everything.ratio: wants float"),
        ({"kind": "large"}, "Everything.kind: wants one of 'small', 7, got str 'large'"),
        ({"kind": []}, "Everything.kind: wants one of"),
        ({"first": [True]}, "Everything.first: wants a list of int"),
        ({"first": [2**64]}, "Everything.first: wants a list of int of 64 bits"),
        ({"pair": [1]}, "Everything.pair: wants a list of 2"),
        ({"many": {}}, "Everything.many: wants a list"),
        ({"many": [{"marks": []}]}, "Everything.many: Inner: field 'size' is missing"),
        ({"maybe": 0}, "Everything.maybe: wants Inner"),
        ({"other": 0}, "Everything: unknown field 'other'"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(change, fault):
    plain = to_plain(everything())
    assert from_plain(Everything, plain) == everything()
    with pytest.raises(ProtocolError, match=re.escape(fault)):
        from_plain(Everything, plain | change)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Everything)])
def test_a_missing_field_is_named(name):
    plain = to_plain(everything())
    del plain[name]
    with pytest.raises(ProtocolError, match=f"Everything: field '{name}' is missing"):
        from_plain(Everything, plain)


@pytest.mark.parametrize(
    "change",
    [{"flag": 0}, {"first": [1]}, {"first": array("f", [1.0])}, {"pair": (1,)}, {"maybe": 3}],
    ids=str,
)
def test_wrong_values_are_not_sent(change):
    with pytest.raises(ProtocolError, match=f"Everything.{next(iter(change))}: wants"):
        frames_of(dataclasses.replace(everything(), **change))


def test_numbers_beyond_64_bits_are_not_sent():
    with pytest.raises(ProtocolError, match="Progress"):
        frames_of(Progress(rank=2**64, phase=""))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a":1}', "[" * 100_000, "\xff"], ids=len)
def test_json_that_is_none_is_refused(text):
    with pytest.raises(ProtocolError):
        from_json(WorkerConfig, text)


def test_only_frozen_dataclasses_of_known_types_travel():
    @dataclass
    class Thawed:
        size: int

    @dataclass(frozen=True)
    class Strange:
        things: "dict[str, int]"  # noqa: UP037

    for thing in (Thawed(1), Strange({})):
        with pytest.raises(TypeError, match="cannot travel on the wire"):
            to_plain(thing)


@given(frames=st.lists(st.binary(max_size=40), max_size=6))
def test_random_frames_are_refused(frames):
    for cls in (StepPlan, Fault, Everything):
        with pytest.raises(ProtocolError):
            read(frames, cls)


@given(data=st.data())
@settings(max_examples=300)
def test_damaged_frames_never_raise_anything_else(data):
    """A flipped bit may give another legal message; it never gives another exception."""
    cls = data.draw(st.sampled_from([StepPlan, Fault, Everything, RuntimeOrders]))
    frames = frames_of(data.draw(instances(cls)))
    index = data.draw(st.integers(0, len(frames) - 1))
    if data.draw(st.booleans()) and frames[index]:
        bit = data.draw(st.integers(0, 8 * len(frames[index]) - 1))
        frames[index] = _flip(frames[index], bit)
    else:
        frames[index] = frames[index][: data.draw(st.integers(0, len(frames[index])))]
    with contextlib.suppress(ProtocolError):
        assert type(read(frames, cls)) is cls


@given(data=st.data())
def test_lost_and_added_frames_are_noticed(data):
    frames = frames_of(everything())
    index = data.draw(st.integers(0, len(frames) - 1))
    with pytest.raises(ProtocolError):
        read(frames[:index] + frames[index + 1 :], Everything)
    with pytest.raises(ProtocolError):
        read([*frames[: index + 1], frames[index], *frames[index + 1 :]], Everything)


@given(data=st.data())
def test_shortened_frames_are_noticed(data):
    frames = frames_of(everything())
    index = data.draw(st.integers(0, len(frames) - 1))
    frames[index] = frames[index][: data.draw(st.integers(0, len(frames[index]) - 1))]
    with pytest.raises(ProtocolError):
        read(frames, Everything)


def test_a_step_plan_costs_tens_of_microseconds():
    rows = Rows(**{name: int32s(range(32)) for name in ("slot", "start", "count", "phase")})
    plan = StepPlan(step=9, rows=rows, block_slot=int32s([1]), block_id=int32s([2]))
    assert _best_us(lambda: read(frames_of(plan), StepPlan)) < 150


@pytest.fixture
def endpoint(tmp_path_factory) -> Iterator[str]:
    name = uuid.uuid4().hex[:8]
    return f"ipc://{tmp_path_factory.mktemp(name[:2])}/{name}"


@pytest.fixture
def pair(endpoint) -> Iterator[tuple[Hub, Peer]]:
    with (
        Hub(endpoint, WORKER_REPORTS, SESSION) as hub,
        Peer(endpoint, "rank 0", WORKER_COMMANDS, SESSION) as peer,
    ):
        yield hub, peer


def test_messages_go_both_ways_in_order(pair):
    hub, peer = pair
    plan = StepPlan(step=1, rows=Rows(slot=int32s([3])))
    for number in range(100):
        peer.send(Progress(rank=0, phase="load", done=number))
        hub.send("rank 0", plan)
    for number in range(100):
        assert hub.receive(5) == ("rank 0", Progress(rank=0, phase="load", done=number))
        assert peer.receive(5) == plan
    assert hub.peers() == ("rank 0",)


def test_a_peer_may_come_before_its_hub_and_a_hub_may_speak_first(endpoint):
    with Peer(endpoint, "rank 0", WORKER_COMMANDS, SESSION) as peer:
        time.sleep(0.1)
        with Hub(endpoint, WORKER_REPORTS, SESSION) as hub:
            hub.send("rank 0", Shutdown())
            assert peer.receive(5) == Shutdown()


def test_receive_waits_no_longer_than_told(pair):
    hub, peer = pair
    begin = time.monotonic()
    assert hub.receive(0) is None
    assert peer.receive(0) is None
    assert hub.receive(0.1) is None
    # ZeroMQ counts whole milliseconds, by a clock of its own.
    assert 0.09 <= time.monotonic() - begin < 1.0


def test_waiting_for_several_hubs(pair, tmp_path):
    hub, peer = pair
    with Hub(f"{hub.endpoint}2", WORKER_REPORTS, SESSION) as idle:
        assert wait_readable([idle, hub], 0.01) == []
        peer.send(Progress(rank=0, phase="load"))
        assert wait_readable([idle, hub], 5) == [hub]


def test_unknown_and_departed_peers_are_named(pair, monkeypatch):
    hub, peer = pair
    monkeypatch.setattr(channel, "AWAIT_PEER_S", 0.05)
    with pytest.raises(ProtocolError, match="peer 'rank 7' is not connected"):
        hub.send("rank 7", Shutdown())
    peer.send(Progress(rank=0, phase="load"))
    hub.receive(5)
    peer.close()
    with pytest.raises(ProtocolError, match="peer 'rank 0' is not connected"):
        _send_until_refused(hub)


def test_a_peer_that_does_not_read_is_named(endpoint, monkeypatch):
    monkeypatch.setattr(channel, "HIGH_WATER_MARK", 2)
    with (
        Hub(endpoint, WORKER_REPORTS, SESSION) as hub,
        Peer(endpoint, "rank 0", WORKER_COMMANDS, SESSION),
        pytest.raises(ProtocolError, match="peer 'rank 0' reads nothing"),
    ):
        _send_until_refused(hub)


@pytest.mark.parametrize(
    ("position", "value", "fault"),
    [
        (0, VERSION + 1, f"protocol version {VERSION + 1}, not {VERSION}"),
        (1, "another", "a message of another session"),
        (2, 1, "message 1 where 0 was due"),
        (3, "Shutdown", "type 'Shutdown' is none of Fault, Hello"),
        (3, "os.system", "type 'os.system' is none of"),
        (2, True, "the header is not"),
        (4, "i", "Progress: 1 arrays announced, 0 sent"),
    ],
)
def test_foreign_headers_are_refused_naming_the_peer(endpoint, position, value, fault):
    frames = frames_of(Progress(rank=0, phase="load"))
    header = msgpack.unpackb(frames[0])
    header[position] = value
    with Hub(endpoint, WORKER_REPORTS, SESSION) as hub, _raw_peer(endpoint, b"rank 1") as raw:
        raw.send_multipart([msgpack.packb(header), *frames[1:]])
        with pytest.raises(ProtocolError, match=f"from peer 'rank 1': {fault}"):
            hub.receive(5)


def test_a_gap_is_noticed_on_both_sides(pair):
    hub, peer = pair
    for number in (0, 2):
        peer.socket.send_multipart(frames_of(Progress(rank=0, phase=""), number))
    assert hub.receive(5) is not None
    with pytest.raises(ProtocolError, match="from peer 'rank 0': message 2 where 1 was due"):
        hub.receive(5)
    hub.socket.send_multipart([b"rank 0", *frames_of(Shutdown(), 1)])
    with pytest.raises(ProtocolError, match="from peer 'hub': message 1 where 0 was due"):
        peer.receive(5)


def test_peers_are_counted_apart(pair):
    hub, peer = pair
    with Peer(hub.endpoint, "rank 1", WORKER_COMMANDS, SESSION) as other:
        for speaker, rank in ((peer, 0), (other, 1), (other, 1)):
            speaker.send(Progress(rank=rank, phase=""))
        got = sorted(hub.receive(5)[1].rank for _ in range(3))
    assert got == [0, 1, 1]
    assert hub.peers() == ("rank 0", "rank 1")


@pytest.mark.parametrize("frames", [[], [b""], [b"\xc1", b"\xc1"], [b"x" * 99] * 5], ids=len)
def test_garbage_on_the_socket_is_refused(endpoint, frames):
    with Hub(endpoint, WORKER_REPORTS, SESSION) as hub, _raw_peer(endpoint, b"\xff!") as raw:
        raw.send_multipart(frames or [b""])
        with pytest.raises(ProtocolError, match=r"peer b'.*its name is not UTF-8"):
            hub.receive(5)
    with Hub(endpoint, WORKER_REPORTS, SESSION) as hub, _raw_peer(endpoint, b"rank 2") as raw:
        raw.send_multipart(frames or [b""])
        with pytest.raises(ProtocolError, match="from peer 'rank 2'"):
            hub.receive(5)


def test_close_is_quick_with_messages_nobody_took(endpoint):
    peer = Peer(endpoint, "rank 0", WORKER_COMMANDS, SESSION)
    peer.send(Progress(rank=0, phase="load"))
    begin = time.monotonic()
    peer.close()
    peer.close()
    assert time.monotonic() - begin < 1.0


def test_close_does_not_wait_for_a_library_that_hangs(endpoint):
    peer = Peer(endpoint, "rank 0", WORKER_COMMANDS, SESSION)
    other = peer._link._context.socket(zmq.DEALER)  # termination waits until it is closed
    begin = time.monotonic()
    peer.close()
    assert time.monotonic() - begin < 1.5
    other.close()


def test_the_last_words_of_a_closing_peer_arrive(endpoint):
    with Hub(endpoint, WORKER_REPORTS, SESSION) as hub:
        with Peer(endpoint, "rank 0", WORKER_COMMANDS, SESSION) as peer:
            peer.send(Progress(rank=0, phase="last"))
        assert hub.receive(5) == ("rank 0", Progress(rank=0, phase="last"))


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://10.0.0.1:5", "udp://127.0.0.1:0", "ipc://", "worker"],
)
def test_open_doors_are_refused(endpoint):
    for make in (Hub, lambda *rest: Peer(rest[0], "rank 0", *rest[1:])):
        with pytest.raises(ConfigError, match="endpoint"):
            make(endpoint, WORKER_REPORTS, SESSION)


def test_an_endpoint_that_cannot_be_bound_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot listen on ipc:"):
        Hub(f"ipc://{tmp_path}/nowhere/worker", WORKER_REPORTS, SESSION)


def test_loopback_tcp_needs_no_keys():
    with (
        Hub("tcp://127.0.0.1:*", WORKER_REPORTS, SESSION) as hub,
        Peer(hub.endpoint, "rank 0", WORKER_COMMANDS, SESSION) as peer,
    ):
        hub.send("rank 0", Shutdown())
        assert peer.receive(5) == Shutdown()


def test_curve_admits_only_who_has_the_key(monkeypatch):
    """On a listening socket that was made before, as between hosts."""
    import socket

    monkeypatch.setattr(channel, "LINGER_MS", 0)
    keys = CurveKeys.generate()
    assert keys.public_only().secret is None
    listener = socket.create_server(("127.0.0.1", 0))
    endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    with (
        Hub(endpoint, WORKER_REPORTS, SESSION, curve=keys, fd=listener.detach()) as hub,
        Peer(endpoint, "rank 0", WORKER_COMMANDS, SESSION, curve=keys.public_only()) as peer,
        Peer(endpoint, "rank 1", WORKER_COMMANDS, SESSION) as keyless,
        Peer(endpoint, "rank 2", WORKER_COMMANDS, SESSION, curve=CurveKeys.generate()) as wrong,
    ):
        assert hub.endpoint == endpoint
        keyless.send(Progress(rank=1, phase=""))
        wrong.send(Progress(rank=2, phase=""))
        peer.send(Progress(rank=0, phase=""))
        assert hub.receive(5) == ("rank 0", Progress(rank=0, phase=""))
        hub.send("rank 0", Shutdown())
        assert peer.receive(5) == Shutdown()
        assert hub.receive(0.3) is None


def everything() -> Everything:
    return Everything(
        flag=True,
        ratio=0.5,
        name=None,
        kind=7,
        first=int32s([1, 2, 3]),
        pair=(1, "x"),
        many=(Inner(int32s([4]), 1), Inner(int32s([5, 6]), 2)),
        maybe=Inner(int32s([7]), 3),
        last=int32s([8]),
    )


def _finished() -> dict[str, Any]:
    return {
        "request_id": 1,
        "reason": "stop",
        "num_prompt_tokens": 1,
        "num_tokens": 1,
        "first_token_s": 0.5,
    }


def _flip(frame: bytes, bit: int) -> bytes:
    damaged = bytearray(frame)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def _best_us(run: Any) -> float:
    best = float("inf")
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(20):
            run()
        best = min(best, (time.perf_counter() - begin) / 20 * 1e6)
    return best


def _send_until_refused(hub: Hub) -> None:
    for _ in range(100_000):
        hub.send(
            "rank 0", Fault(rank=0, phase="", step=0, error="", message="x" * 999, traceback="")
        )


class _raw_peer:  # noqa: N801
    """A DEALER that writes what it likes."""

    def __init__(self, endpoint: str, identity: bytes) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.connect(endpoint)

    def __enter__(self) -> zmq.Socket[bytes]:
        return self._socket

    def __exit__(self, *_: object) -> None:
        self._socket.close(linger=0)
        self._context.term()
