"""The block ledger against a brute-force picture of who uses what."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.runtime.block_ledger import BlockLedger


@given(
    num_blocks=st.integers(0, 12),
    moves=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 20)), max_size=60
    ),
)
def test_blocks_come_back_and_content_stays_until_it_is_evicted(
    num_blocks: int, moves: list[tuple[int, int, int]]
) -> None:
    ledger = BlockLedger(num_blocks)
    users: list[list[int]] = []
    content: dict[int, bytes] = {}
    for number, (kind, count, which) in enumerate(moves):
        used = Counter(block for blocks in users for block in blocks)
        assert ledger.num_free == num_blocks - len(used)
        if kind == 0 and ledger.can_take(count):
            fresh = ledger.take(count)
            assert len(set(fresh) - used.keys()) == count
            assert all(1 <= block <= num_blocks for block in fresh)
            for block in fresh:
                content.pop(block, None)
                assert ledger.cache.name_of(block) is None
            users.append(fresh)
        elif kind == 1 and content:
            shared = [sorted(content)[which % len(content)]]
            assert ledger.cache.find([content[shared[0]]]) == shared
            ledger.share(shared)
            users.append(shared)
        elif kind == 2 and users:
            for block in users[which % len(users)]:
                if block not in content:
                    content[block] = b"%d" % (1000 * number + block)
                    ledger.cache.publish(block, content[block])
        elif kind == 3 and users:
            ledger.give_back(users.pop(which % len(users)))
        ledger.audit()


def test_what_rests_longest_is_evicted_and_tails_before_heads() -> None:
    ledger = BlockLedger(5)
    old, new = ledger.take(2), ledger.take(2)
    for block in (*old, *new):
        ledger.cache.publish(block, b"%d" % block)
    ledger.give_back(old)
    ledger.give_back(new)
    ledger.share([old[1]])
    ledger.give_back([old[1]])
    assert ledger.take(5) == [5, old[0], new[1], new[0], old[1]]


def test_resting_blocks_that_are_shared_cannot_be_taken_too() -> None:
    ledger = BlockLedger(3)
    blocks = ledger.take(3)
    ledger.cache.publish(blocks[0], b"name")
    ledger.give_back(blocks)
    assert ledger.can_take(3)
    assert ledger.can_take(2, [blocks[0]])
    assert not ledger.can_take(3, [blocks[0]])


def test_misuse_is_our_own_mistake() -> None:
    ledger = BlockLedger(4)
    with pytest.raises(AssertionError):
        ledger.take(5)
    blocks = ledger.take(2)
    ledger.give_back(blocks)
    with pytest.raises(KeyError):
        ledger.give_back(blocks)
