"""Names of blocks, and what is found under them."""

from __future__ import annotations

from array import array

import pytest

from unisono.runtime.prefix_cache import PrefixCache


def test_a_name_stands_for_all_tokens_up_to_its_end() -> None:
    cache = PrefixCache()
    one, two = array("i", range(64)), array("i", range(1, 65))
    head, other = cache.name(b"", one), cache.name(b"", two)
    names = {head, other, cache.name(head, one), cache.name(other, one), cache.name(head, two)}
    assert len(names) == 5
    assert cache.name(b"", array("i", range(64))) == head


def test_another_run_has_other_names() -> None:
    tokens = array("i", range(64))
    assert PrefixCache().name(b"", tokens) != PrefixCache().name(b"", tokens)


def test_the_longest_published_head_is_found() -> None:
    cache = PrefixCache()
    for block, name in ((7, b"a"), (3, b"b"), (5, b"d")):
        cache.publish(block, name)
    assert cache.find([b"a", b"b", b"c", b"d"]) == [7, 3]
    assert cache.find([b"x", b"a"]) == []
    cache.audit()


def test_of_two_blocks_with_the_same_content_the_first_stays() -> None:
    cache = PrefixCache()
    cache.publish(1, b"a")
    cache.publish(2, b"a")
    assert cache.find([b"a"]) == [1]
    assert not cache.rest(2)
    assert cache.rest(1)
    assert (cache.num_resting, cache.evict(), cache.find([b"a"])) == (1, 1, [])
    with pytest.raises(StopIteration):
        cache.evict()
    cache.audit()
