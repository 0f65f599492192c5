"""What ranks say of their steps survives the wire."""

from __future__ import annotations

from array import array
from dataclasses import replace

import msgpack
import pytest

from unisono.ops.device_time import MOST_KINDS, DeviceTime, KernelTime, Watched
from unisono.workers.channel import decode_header, decode_message, encode_message
from unisono.workers.codec import ProtocolError
from unisono.workers.protocol import WORKER_COMMANDS, WORKER_REPORTS
from unisono.workers.timings import StepsSeen, WatchSteps

DEVICE = DeviceTime(
    num_steps=15,
    num_kernels=310,
    num_copies=1,
    num_collectives=72,
    busy_ns=3_400_000,
    collective_ns=200_000,
    idle_ns=600_000,
    gap_ns=20_000,
    kernels=(
        KernelTime(name="_ordered_kernel", num_launches=145, busy_ns=2_900_000),
        KernelTime(name="one_shot_all_reduce_kernel", num_launches=72, busy_ns=200_000),
        KernelTime(name="Memcpy DtoH", num_launches=1, busy_ns=2_000),
    ),
)
WATCHED = Watched(
    period_ns=array("q", [2**40, 5]),
    launch_ns=array("q", [7]),
    num_keys=4096,
    num_tokens=16,
    num_replays=32,
    num_captures=0,
    eager=(("tail", "sampling", 16), ("forward", "first run", 1)),
    num_collectives=0,
    collective_ns=0,
    memory_bytes=2**37,
)


@pytest.mark.parametrize(
    "message",
    [
        WatchSteps(num_rows=32, num_tokens=32, phase=2, skip=4, num_steps=65),
        WatchSteps(num_rows=4, num_tokens=256, phase=1, skip=0, num_steps=16, traced=True),
        StepsSeen(rank=1, watched=WATCHED),
        StepsSeen(rank=0, watched=replace(WATCHED, device=DEVICE, eager=())),
    ],
)
def test_messages_come_back_as_they_were_sent(message):
    frames = encode_message(message, "s" * 32, 3)
    header = decode_header(frames)
    assert header.type_name == type(message).__name__
    assert decode_message(header, frames, type(message)) == message


def test_a_damaged_report_is_refused():
    frames = encode_message(StepsSeen(rank=0, watched=WATCHED), "s" * 32, 0)
    with pytest.raises(ProtocolError, match=r"Watched\.launch_ns"):
        decode_message(decode_header(frames)._replace(typecodes="q"), frames[:-1], StepsSeen)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda kernels: kernels * (MOST_KINDS + 1), r"DeviceTime: 257 kinds of kernels"),
        (lambda kernels: [{**kernels[0], "name": "x" * 57}], r"KernelTime: a name of 57 char"),
    ],
)
def test_no_more_kernels_are_taken_in_than_may_be_told_of(damage, message):
    frames = encode_message(StepsSeen(rank=0, watched=replace(WATCHED, device=DEVICE)), "s" * 32, 0)
    body = msgpack.unpackb(frames[1])
    device = body["watched"]["device"]
    device["kernels"] = damage(device["kernels"][:1])
    frames[1] = msgpack.packb(body)
    with pytest.raises(ProtocolError, match=message):
        decode_message(decode_header(frames), frames, StepsSeen)


def test_both_ends_know_them():
    assert WatchSteps in WORKER_COMMANDS
    assert StepsSeen in WORKER_REPORTS
