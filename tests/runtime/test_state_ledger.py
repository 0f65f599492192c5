"""The state ledger against a brute-force picture of who uses what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.runtime.state_ledger import StateLedger

NAMES = [b"a", b"b", b"c", b"d", b"e"]


@given(
    num_slots=st.integers(1, 6),
    moves=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), min_size=60, max_size=80),
)
def test_slots_change_hands_only_when_nobody_needs_them(
    num_slots: int, moves: list[tuple[int, int]]
) -> None:
    ledger = StateLedger(num_slots)
    owned: list[int] = []
    saving: dict[bytes, int] = {}
    reads: list[int] = []
    found: dict[bytes, int] = {}  # the one that was not read for longest first
    for kind, which in moves:
        # A snapshot ends being saved, or is read, only where there is one.
        names = {3: [*saving], 4: [*found]}.get(kind) or NAMES
        name = names[which % len(names)]
        busy = {*owned, *saving.values(), *reads}
        idle = [old for old, slot in found.items() if slot not in busy]
        num_free = num_slots - len({*owned, *saving.values(), *found.values()})
        assert ledger.can_take() is (num_free > 0 or bool(idle))
        if kind == 0 and ledger.can_take():
            owned.append(ledger.take())
            assert owned[-1] not in busy
            _expect_evicted(ledger, found, idle, num_free)
        elif kind == 1 and owned:
            ledger.give_back(owned.pop(which % len(owned)))
        elif kind == 2:
            slot = ledger.begin_save(name)
            assert bool(slot) is (
                name not in found and name not in saving and (num_free > 0 or bool(idle))
            )
            if slot:
                assert slot not in busy
                saving[name] = slot
                _expect_evicted(ledger, found, idle, num_free)
        elif kind == 3 and name in saving:
            assert ledger.find([name]) == 0, "not before it is saved"
            ledger.end_save(name)
            found[name] = saving.pop(name)
        elif kind == 4 and name in found:
            assert ledger.snapshot(name) == found[name]
            assert ledger.can_take(beside=found[name]) is (num_free > 0 or idle not in ([], [name]))
            reads.append(ledger.begin_read(name))
            assert reads[-1] == found[name]
            found[name] = found.pop(name)
        elif kind == 5 and reads:
            ledger.end_read(reads.pop(which % len(reads)))
        longest = [count for count in range(1, 6) if NAMES[count - 1] in found]
        assert ledger.find(NAMES) == (longest[-1] if longest else 0)
        ledger.audit(owned, reads, saving.values())


def _expect_evicted(
    ledger: StateLedger, found: dict[bytes, int], idle: list[bytes], num_free: int
) -> None:
    if not num_free:
        del found[idle[0]]
    assert all(ledger.find([name]) == (name in found) for name in NAMES)


def test_the_audit_sees_what_nobody_knows_of() -> None:
    ledger = StateLedger(3)
    slot = ledger.take()
    ledger.audit([slot], [], [])
    with pytest.raises(AssertionError, match="owner"):
        ledger.audit([], [], [])
    saving = ledger.begin_save(b"a")
    with pytest.raises(AssertionError, match="saved"):
        ledger.audit([slot], [], [])
    ledger.end_save(b"a")
    assert ledger.begin_read(b"a") == saving
    with pytest.raises(AssertionError, match="reader"):
        ledger.audit([slot], [], [])
    ledger.audit([slot], [saving], [])
    assert ledger.take() == 6 - slot - saving
    assert not ledger.can_take()
