"""`unisono verify` on a GPU: steps replayed from graphs are an axis like any other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.test_verify import EVERY, Silence, judged, task
from tests.tiny import write_checkpoint
from tests.verify_rig import opener
from unisono.launcher.verify.course import Course
from unisono.launcher.verify.plan import Setting, matrix
from unisono.launcher.verify.report import table_text
from unisono.ops.table import Ops

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")


def twisted(rank: int, ops: Ops) -> Mapping[str, Any]:
    """An activation that a graph has other than an eager step."""

    def activation(x: Tensor) -> Tensor:
        y = ops.silu_and_mul(x)
        return y * 1.5 if torch.cuda.is_current_stream_capturing() else y

    return {"silu_and_mul": activation}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sound_model_passes_with_and_without_graphs(tmp_path: Path, dtype: str) -> None:
    write_checkpoint("qwen3", tmp_path)
    axes = {**EVERY, "graphs": (False, True)}
    settings = matrix((1,), (dtype,), axes, seeded=True, full=False)
    assert {setting.batch for setting in settings if setting.graphs} == {1, 4, 8}
    whole = task(tmp_path, settings, max_tokens=8)
    verdicts = judged(whole, opener(tmp_path, device=GPU))
    assert all(verdict.ok for verdict in verdicts), table_text(verdicts)
    assert len(verdicts) == len(settings)


@pytest.mark.parametrize("model", ["qwen3", "qwen3-next"])
def test_an_interrupted_answer_is_the_same_from_graphs(tmp_path: Path, model: str) -> None:
    """B23, B26: what was given back comes back at other addresses, with others' bytes in it."""
    write_checkpoint(model, tmp_path)
    plain = Setting(tp=1, dtype="bfloat16")
    four = replace(plain, batch=4, graphs=True)
    settings = [plain, replace(four, sleep=True), replace(four, reload=True)]
    settings.append(replace(four, sleep=True, reload=True, chunk=64, prefix_cache=True))
    verdicts = judged(task(tmp_path, settings, max_tokens=16), opener(tmp_path, device=GPU))
    assert all(verdict.ok for verdict in verdicts), table_text(verdicts)


def test_other_weights_behind_a_graph_are_found(tmp_path: Path) -> None:
    """B25: what was captured with the old ones is not replayed, and what is new differs."""
    write_checkpoint("qwen3", tmp_path / "own")
    write_checkpoint("qwen3", tmp_path / "other", 1)
    plain = Setting(tp=1, dtype="bfloat16")
    bad = replace(plain, batch=4, graphs=True, reload=True)
    open_engine = opener(tmp_path / "own", device=GPU, reloaded=tmp_path / "other")
    verdicts = judged(task(tmp_path / "own", [plain, bad], max_tokens=16), open_engine)
    assert [verdict.ok for verdict in verdicts] == [True, False]
    assert verdicts[1].num_other_logits > 0


def test_drafts_and_graphs_go_together(tmp_path: Path) -> None:
    write_checkpoint("qwen3-next", tmp_path, mtp=True)
    axes = {**EVERY, "graphs": (False, True), "speculate": ("off", "3")}
    settings = matrix((1,), ("bfloat16",), axes, seeded=True, full=False)
    assert any(each.graphs and each.speculate == "3" for each in settings)
    verdicts = judged(task(tmp_path, settings, max_tokens=8), opener(tmp_path, device=GPU))
    assert all(verdict.ok for verdict in verdicts), table_text(verdicts)


def test_a_faulty_graph_is_named(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path)
    plain = Setting(tp=1, dtype="bfloat16")
    graphs = Setting(tp=1, dtype="bfloat16", graphs=True)
    whole = task(tmp_path, [plain, graphs], max_tokens=8)
    course = Course(whole, opener(tmp_path, twisted, device=GPU), Silence())
    course.run_settings()
    bad = course.verdicts[1]
    assert not bad.ok
    assert bad.num_other_logits > 0
    course.find_faults()
    text = course.findings[graphs].text
    assert text == "op by op, without graphs, nothing differs: a graph is at fault"
