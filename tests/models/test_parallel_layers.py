"""Parallel layers against the unsharded formula: cuts, merges, and the bias that is added once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_close, assert_same_bits
from tests.rig import run_ranks
from unisono.models.interface import Build
from unisono.models.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from unisono.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from unisono.models.layers.norm import RMSNorm
from unisono.models.partition import Partition
from unisono.ops import dispatch
from unisono.ops.by_reference import with_references
from unisono.ops.comm import Group, PeerLost, ordered_sum
from unisono.ops.direct import Direct
from unisono.ops.reference.norm import add_rms_norm
from unisono.workers.tracer import Tracer

CPU = torch.device("cpu")
RANKS = [1, 2, 3, 4]


def build(group: Group, dtype: torch.dtype = torch.float32) -> Build:
    return Build(dispatch.resolve(CPU, 8), group, dtype, CPU)


def row_parallel(x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int) -> list[Tensor]:
    cut = Partition.even(weight.shape[1], ranks)

    def body(group: Group) -> Tensor:
        start, stop = cut.ranges[group.rank]
        layer = RowParallelLinear(
            build(group), "down", stop - start, weight.shape[0], bias is not None
        )
        for name, target in layer.targets("m."):
            target.copy_(weight[:, start:stop] if name == "m.down.weight" else bias)
        layer.pack()
        return layer(x[:, start:stop].contiguous()).total()

    return run_ranks(ranks, body)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("rows", [1, 7])
def test_row_bias_of_1000_is_added_once(ranks: int, rows: int) -> None:
    """B18: not once a rank."""
    x, weight = torch.randn(rows, 13), torch.randn(9, 13)
    bias = torch.full((9,), 1000.0)
    want = (x.double() @ weight.double().T + 1000.0).float()
    ulp = 1000.0 * torch.finfo(torch.float32).eps
    for got in row_parallel(x, weight, bias, ranks):
        assert float((got - want).abs().max()) <= 2 * ulp


@pytest.mark.parametrize("ranks", RANKS)
def test_row_without_bias(ranks: int) -> None:
    x, weight = torch.randn(5, 13), torch.randn(9, 13)
    results = row_parallel(x, weight, None, ranks)
    assert_close("rows", results[0], x @ weight.T, 1e-6)
    assert all(torch.equal(result, results[0]) for result in results), "ranks hold other bits"


@pytest.mark.parametrize("ranks", RANKS)
def test_column_parts_keep_their_own_cut_and_bias(ranks: int) -> None:
    """q, k and v of odd sizes are cut one by one, never as one block."""
    sizes = {"q": 12, "k": 4, "v": 8}
    weights = {name: torch.randn(rows, 5) for name, rows in sizes.items()}
    biases = {name: torch.randn(rows) for name, rows in sizes.items()}
    x = torch.randn(6, 5)

    def body(group: Group) -> dict[str, Tensor]:
        cuts = {
            name: Partition.even(rows, ranks).ranges[group.rank] for name, rows in sizes.items()
        }
        parts = {name: stop - start for name, (start, stop) in cuts.items()}
        layer = ColumnParallelLinear(build(group), 5, parts, bias=True)
        for name, target in layer.targets(""):
            part, kind = name.split(".")
            start, stop = cuts[part]
            target.copy_((weights if kind == "weight" else biases)[part][start:stop])
        layer.pack()
        return dict(zip(parts, layer(x).split(list(parts.values()), dim=1), strict=True))

    results = run_ranks(ranks, body)
    for name in sizes:
        got = torch.cat([result[name] for result in results], dim=1)
        assert_close(name, got, x @ weights[name].T + biases[name], 1e-6)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_vocabulary_shards(ranks: int, dtype: torch.dtype) -> None:
    vocab = Partition.even(1003, ranks, 64)
    table = torch.randn(1003, 12).to(dtype)
    ids = torch.tensor([0, 63, 64, 500, 1002])
    hidden = torch.randn(5, 12).to(dtype)

    def body(group: Group) -> tuple[Tensor, Tensor]:
        start, stop = vocab.ranges[group.rank]
        embedding = VocabParallelEmbedding(build(group, dtype), vocab, 12)
        embedding.weight.copy_(table[start:stop])
        head = VocabParallelHead(build(group, dtype), vocab, 12)
        head.pack(embedding.weight)
        return embedding(ids), head(hidden)

    results = run_ranks(ranks, body)
    for embedded, _ in results:
        assert torch.equal(embedded, table[ids])
    logits = torch.cat([part for _, part in results], dim=1)
    assert logits.dtype == torch.float32
    assert_close("logits", logits, hidden.float() @ table.float().T, 1e-6)


class Fusing(Direct):
    """Sums and norms in one, as a kernel would; for an even number of tokens."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.num_served = 0

    def all_reduce_add_rms_norm(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        if len(x) % 2:
            return None
        self.num_served += 1
        total = ordered_sum(self._group._gather(x))
        return add_rms_norm(total if bias is None else total + bias, residual, weight, eps)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_norm_takes_the_sum_over_ranks_into_its_kernel(ranks: int, has_bias: bool) -> None:
    """Where one serves it; bits and digest are the same either way."""
    x, weight, bias = torch.randn(2, 12), torch.randn(9, 12), torch.randn(9)
    cut = Partition.even(12, ranks)

    def body(group: Group) -> list[Tensor]:
        outputs, digests = [], []
        start, stop = cut.ranges[group.rank]
        for fuses, tokens in ((False, 2), (True, 2), (True, 1), (False, 1)):
            group.direct = direct = Fusing(group) if fuses else Direct()
            group.digest = group._sequence = 0
            ops = replace(dispatch.resolve(CPU, 8), fuses_sums=fuses)
            built = Build(ops, group, torch.float32, CPU)
            layer = RowParallelLinear(built, "down", stop - start, 9, has_bias)
            for name, target in layer.targets(""):
                target.copy_(weight[:, start:stop] if name == "down.weight" else bias)
            layer.pack()
            norm = RMSNorm(built, 9, 1e-6)
            norm.weight.copy_(bias)
            part = layer(x[:tokens, start:stop].contiguous())
            outputs.append(torch.cat(norm.add(part, x[:tokens, :9])))
            digests.append(group.digest)
            if isinstance(direct, Fusing):
                assert direct.num_served == (tokens == 2)
        assert digests[0] == digests[1] != digests[2] == digests[3]
        return outputs

    for apart, fused, fallen_back, apart_again in run_ranks(ranks, body):
        assert_same_bits("fused", fused, apart)
        assert_same_bits("not served", fallen_back, apart_again)


def test_ops_that_are_watched_or_replaced_are_called_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fusing = replace(dispatch.resolve(CPU, 8), fuses_sums=True)
    assert with_references(fusing, []).fuses_sums
    assert not with_references(fusing, ["add_rms_norm"]).fuses_sums
    assert not Tracer(str(tmp_path), 0).tap(fusing, "layers.0").fuses_sums
    monkeypatch.setattr(dispatch, "_cpu_ops", lambda head_dim: fusing)
    assert dispatch.resolve(CPU, 8).fuses_sums
    with dispatch.use(reduce_rows=fusing.reduce_rows):
        assert not dispatch.resolve(CPU, 8).fuses_sums
    with pytest.raises(ValueError, match="no op named fuses_sums"), dispatch.use(fuses_sums=len):
        pass


def test_a_broken_collective_is_a_consequence_not_a_cause() -> None:
    class Broken(Group):
        def _gather(self, x: Tensor) -> Tensor:
            def fail() -> None:
                raise RuntimeError("connection closed by peer")

            self._guarded(fail)
            return x

    layer = RowParallelLinear(build(Broken(1, 2, None)), "o", 4, 4, bias=False)
    for _, target in layer.targets(""):
        target.zero_()
    layer.pack()
    with pytest.raises(PeerLost, match="collective 1 failed on rank 1: connection closed"):
        layer(torch.zeros(1, 4)).total()
