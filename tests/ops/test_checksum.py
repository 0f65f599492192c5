"""Checksums: every bit counts, the cut does not."""

from __future__ import annotations

import pytest
import torch

from unisono.ops.checksum import row_checksums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_shards_add_up_and_one_bit_shows(dtype: torch.dtype) -> None:
    x = torch.randn(5, 301).to(dtype)
    whole = row_checksums(x)
    parts = [row_checksums(x[:, :77]), row_checksums(x[:, 77:].contiguous(), 77)]
    assert torch.equal(whole, parts[0] + parts[1])
    assert torch.equal(whole, torch.cat([row_checksums(row[None]) for row in x]))
    other = x.clone()
    bits = other.view(torch.int32 if dtype == torch.float32 else torch.int16)
    bits[3, 200] ^= 1
    assert (row_checksums(other) != whole).tolist() == [False, False, False, True, False]


def test_order_and_the_sign_of_zero_count() -> None:
    x = torch.randn(1, 64)
    assert row_checksums(x) != row_checksums(x.flip(1))
    assert row_checksums(torch.zeros(1, 3)) != row_checksums(-torch.zeros(1, 3))
    assert row_checksums(torch.zeros(0, 3)).shape == (0,)
    assert len({*row_checksums(torch.zeros(3, 4, 2)).tolist()}) == 1


def test_long_rows_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(9, 100)
    whole = row_checksums(x)
    monkeypatch.setattr("unisono.ops.checksum._PIECE_ITEMS", 200)
    assert torch.equal(row_checksums(x), whole)
