"""The process that asks transformers, in float32, for the log-probabilities of given tokens.

A child of `unisono verify --against transformers`: it alone loads torch and transformers.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unisono.workers.channel import Peer
from unisono.workers.orders import die_with_parent, read_orders
from unisono.workers.protocol import int32s

if TYPE_CHECKING:
    from torch import Tensor

PROCESS = "oracle"
_PIECE = 64
"""Positions whose logits are made float64 at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleOrders:
    """What the process is told."""

    directory: str
    gguf_file: str
    """Its file in `directory`; empty: safetensors."""
    device: str
    threads: int
    endpoint: str
    session: str
    num_ids: int
    sequences: tuple[array[int], ...]
    """Token ids."""
    ids: tuple[array[int], ...]
    """Of each sequence, for each token but the first: `num_ids` ids that are asked about at its
    place; -1: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleAnswer:
    """Log-probabilities of one sequence, in the layout of `logprob_width(num_ids + 1)`.

    For each token but the first: its own, the likeliest id with its own, those asked about.
    """

    index: int
    logprobs: array[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleFailed:
    """The end: transformers cannot load or run the model."""

    message: str


ORACLE_REPORTS = (OracleAnswer, OracleFailed)


def main() -> None:
    """Orders come over stdin, answers leave over the channel, one for each sequence in order."""
    orders, parent_pid = read_orders(OracleOrders)
    die_with_parent(parent_pid)
    with Peer(orders.endpoint, PROCESS, (), orders.session) as peer:
        try:
            for answer in _answers(orders):
                peer.send(answer)
        except Exception as error:
            peer.send(OracleFailed(message=f"{type(error).__name__}: {error}"))


def _answers(orders: OracleOrders) -> Iterator[OracleAnswer]:
    import torch

    torch.set_num_threads(orders.threads)
    model = _load(orders)
    with torch.inference_mode():
        for index, (sequence, ids) in enumerate(zip(orders.sequences, orders.ids, strict=True)):
            tokens = torch.tensor(sequence, dtype=torch.int64, device=orders.device)
            logits = model(tokens[None]).logits[0, :-1]
            asked = torch.tensor(ids, dtype=torch.int64).view(-1, orders.num_ids)
            logprobs = int32s()
            for start in range(0, len(logits), _PIECE):
                piece = slice(start, start + _PIECE)
                logprobs += _records(logits[piece], tokens[1:][piece], asked[piece])
            yield OracleAnswer(index=index, logprobs=logprobs)


def _load(orders: OracleOrders) -> Any:
    """The model in float32, attention by the formula. Raises whatever transformers raises."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source = {"gguf_file": orders.gguf_file} if orders.gguf_file else {"use_safetensors": True}
    auto: Any = transformers.AutoModelForCausalLM
    model, loaded = auto.from_pretrained(
        orders.directory,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        output_loading_info=True,
        **source,
    )
    # It fills what it does not find with random numbers.
    if missing := sorted(loaded["missing_keys"]):
        raise LookupError(f"transformers finds no weights for {', '.join(missing[:3])}")
    return model.eval().to(orders.device)


def _records(logits: Tensor, tokens: Tensor, asked: Tensor) -> array[int]:
    """Logits [n, vocabulary], the tokens that came [n], the ids asked about [n, num_ids]."""
    import torch

    logprobs = logits.double().log_softmax(-1)
    best = logprobs.max(-1, keepdim=True)
    own = logprobs.gather(1, tokens[:, None])
    chosen = logprobs.gather(1, asked.clamp(min=0).to(logprobs.device))
    ids = torch.cat([best.indices.cpu(), asked], 1).int()
    bits = torch.cat([own, best.values, chosen], 1).float().cpu().view(torch.int32)
    pairs = torch.stack([ids, bits[:, 1:]], 2).flatten(1)
    ranks = torch.zeros(len(tokens), 1, dtype=torch.int32)
    return int32s(torch.cat([bits[:, :1], ranks, pairs], 1).flatten().tolist())
