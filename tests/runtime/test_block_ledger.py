"""The block ledger against a brute-force picture of who owns what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.runtime.block_ledger import BlockLedger


@given(
    num_blocks=st.integers(0, 12),
    moves=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(0, 20)), max_size=60
    ),
)
def test_blocks_are_owned_once_and_come_back(
    num_blocks: int, moves: list[tuple[int, int, int]]
) -> None:
    ledger = BlockLedger(num_blocks)
    owners: list[tuple[list[int], int]] = []
    for kind, count, which in moves:
        held = sum(len(blocks) + reserved for blocks, reserved in owners)
        assert ledger.num_free == num_blocks - held
        if kind == 0:
            fits = count <= num_blocks - held
            assert ledger.reserve(count) is fits
            if fits:
                owners.append(([], count))
        elif owners:
            blocks, reserved = owners.pop(which % len(owners))
            if kind == 1:
                taken = ledger.take(min(count, reserved))
                owners.append((blocks + taken, reserved - len(taken)))
            else:
                ledger.give_back(blocks, reserved)
        ledger.audit()
        everyone = [block for blocks, _ in owners for block in blocks]
        assert len(set(everyone)) == len(everyone)
        assert all(1 <= block <= num_blocks for block in everyone)


def test_misuse_is_our_own_mistake() -> None:
    ledger = BlockLedger(4)
    with pytest.raises(AssertionError):
        ledger.take(1)
    assert ledger.reserve(2)
    blocks = ledger.take(2)
    ledger.give_back(blocks, 0)
    with pytest.raises(KeyError):
        ledger.give_back(blocks, 0)
    with pytest.raises(AssertionError):
        ledger.give_back([], 1)
