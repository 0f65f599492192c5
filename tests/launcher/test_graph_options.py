"""Which graphs are captured and when: what is resolved, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launcher.fakes import tiny_model
from unisono.launcher.graph_options import buckets_up_to, resolve_graphs
from unisono.launcher.resolve import HostFacts, resolve_config
from unisono.models.config import ConfigError
from unisono.workers.config import WorkerConfig

GPU = HostFacts(num_gpus=1, torch_has_cuda=True)


def worker(**changes: Any) -> WorkerConfig:
    fields = {"device": "cuda", "attn": "triton", **changes}
    return WorkerConfig(model_path="m", model=tiny_model(), **fields)


@pytest.mark.parametrize(
    ("most", "buckets"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (11, (1, 2, 4, 8, 11)),
        (40, (1, 2, 4, 8, 16, 24, 32, 40)),
        (129, (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 129)),
        (200, (*(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128), 160, 192, 200)),
    ],
)
def test_unless_asked_buckets_go_up_to_all_requests(most: int, buckets: tuple[int, ...]) -> None:
    assert buckets_up_to(most) == buckets
    assert resolve_graphs(worker(max_requests=most)).graph_buckets == buckets


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graph_buckets": (0, 4)}, "--graph-buckets 0,4: a step has at least 1 row; choose 1 to"),
        ({"graph_buckets": (4, 2)}, "--graph-buckets 4,2: must ascend; choose 2,4"),
        ({"graph_buckets": (2, 2, 8)}, "--graph-buckets 2,2,8: must ascend; choose 2,8"),
        (
            {"graph_buckets": (8, 64)},
            "--graph-buckets 8,64: at most --max-requests 32 rows decode in a step; choose 1 to 32",
        ),
        (
            {"graph_buckets": (1, 2), "device": "cpu"},
            "--graph-buckets 1,2: cpu has no graphs; leave it out, or --device cuda where",
        ),
        ({"capture": "start", "device": "cpu"}, "--capture start: cpu has no graphs; leave it out"),
        (
            {"capture": "start", "attn": "reference"},
            "--capture start: with --attn reference nothing is captured; leave it out, or --attn",
        ),
        ({"capture": "start", "no_graphs": True}, "--capture start: --no-graphs captures nothing"),
        (
            {"random_padding": True, "device": "cpu"},
            "--random-padding: cpu has no graphs; leave it out, or --device cuda where there is",
        ),
        (
            {"random_padding": True, "attn": "reference"},
            "--random-padding: with --attn reference nothing is captured; leave it out, or --attn",
        ),
        ({"graph_buckets": (1,), "no_graphs": True}, "--graph-buckets 1: --no-graphs captures"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(options, "path", tiny_model(), GPU)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_asked_buckets_stay_and_a_cpu_has_none() -> None:
    asked = {"graph_buckets": (1, 12), "capture": "start", "max_requests": 12}
    resolved = resolve_config(asked, "path", tiny_model(), GPU).runtime.worker
    assert (resolved.graph_buckets, resolved.capture) == ((1, 12), "start")
    resolved = resolve_config({"device": "cpu"}, "path", tiny_model(), GPU).runtime.worker
    assert (resolved.graph_buckets, resolved.capture) == ((), "lazy")
