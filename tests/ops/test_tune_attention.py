"""What scripts/tune_attention.py times: the op's own answer, by every launch."""

from __future__ import annotations

import pytest
import torch

from tests.ops.kernel_rig import DEVICE, MARKS, make_products_hide_their_shape
from tests.paths import loaded_script
from unisono.ops.attention import AttentionShape
from unisono.ops.kernels import attention
from unisono.ops.kernels.attention_launch import Launch

SHAPE = AttentionShape(4, 2, 16)

pytestmark = MARKS


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    make_products_hide_their_shape(monkeypatch)
    with loaded_script("tune_attention") as module:
        module.DEVICE, module.DTYPE = DEVICE, torch.float16
        module.time_us = lambda call: float(call().shape[0])
        module.DECODE_LAUNCHES = (Launch(16, 4, 2), Launch(16, 4, 2, 2), Launch(16, 4, 2, 4, 168))
        module.PREFILL_LAUNCHES = (Launch(16, 4, 1), Launch(32, 4, 1))
        yield module


def test_rows_and_prompts_by_every_launch(script) -> None:
    serving = attention.decode_launch, attention.prefill_launch
    for mix, count in (
        (script.decode_mix("rows", SHAPE, [1, 300, 600]), 3),
        (script.prompt_mix("prompts", SHAPE, 2, 70), 2),
    ):
        entry = script.measure(mix, 1e9)
        assert entry["unequal"] == []
        assert len(entry["us"]) == count
        assert entry["serving_us"] == len(mix.q)
        assert mix.name in script._line(entry)
    assert (attention.decode_launch, attention.prefill_launch) == serving


def test_a_launch_with_other_bits_is_told(script, monkeypatch: pytest.MonkeyPatch) -> None:
    mix = script.prompt_mix("prompts", SHAPE, 1, 20)
    answers = iter(range(100))
    monkeypatch.setattr(script, "paged_attention", lambda *_: torch.full((1,), next(answers)))
    entry = script.measure(mix, 1e9)
    assert len(entry["unequal"]) == 2
    assert "DIFFERENT BITS" in script._line(entry)


def test_what_is_counted(script) -> None:
    rows = script.decode_mix("rows", SHAPE, [10, 70])
    assert rows.num_bytes == 80 * 2 * 2 * 2 * 16  # Keys and values of two heads, two bytes each.
    prompts = script.prompt_mix("prompts", SHAPE, 3, 4)
    # 10 pairs of a query and a key that it sees, each 16 products and sums, twice, in 4 heads.
    assert prompts.num_flops == 3 * 10 * 4 * 16 * 4
