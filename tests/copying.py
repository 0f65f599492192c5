"""A checkpoint whose MTP layer is right by construction: every draft is what the model answers.

Half of the channels, the lower ones, carry the last token from the embedding to the head; layers
write to the others alone, which the head does not read. So the likeliest token depends on the last
one only, while states, caches and the size of the logits depend on all of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.tiny import MTP_FIELDS, add_tensors, mtp_tensors, oracle_model, oracle_mtp

FIRST = 3
"""The least token that is no special one: only from here on tokens follow each other."""
SHARPNESS = 1.5
"""Length of the head's rows: the likeliest token has a margin, and others a chance."""
MARK = 4.0
"""What the embedding says in its last channel of tokens that the drafter errs on."""
_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")
"""Endings of what a mixer or an MLP writes with: [..., hidden, channels]."""


@dataclass(frozen=True)
class Copying:
    """What such a model answers, and where its drafts are right."""

    successors: tuple[int, ...]
    """By token, from FIRST on: the likeliest after it. They form one circle."""
    wrong: frozenset[int]

    def answer(self, token_id: int, count: int) -> list[int]:
        """The greedy answer of `count` tokens behind `token_id`."""
        answer = [token_id]
        for _ in range(count):
            answer.append(self.successors[answer[-1]])
        return answer[1:]

    def num_right(self, token_id: int, count: int) -> int:
        """How many drafts of a chain of `count` behind `token_id` the model would answer too."""
        read = [token_id, *self.answer(token_id, count - 1)]
        return next((i for i, each in enumerate(read) if each in self.wrong), count)


@torch.no_grad()
def write_copying_mtp(
    name: str,
    directory: Path,
    *,
    wrong: Collection[int] = (),
    silent: bool = False,
    seed: int = 0,
    **fields: Any,
) -> Copying:
    """Save such a variant of the checkpoint `name` (one of DRAFTING, its head never tied), with
    `fields` in its configuration.

    Behind the tokens of `wrong` the draft is another one than the answer. With `silent` no layer
    writes anything: then the logits of drafts are those of the model but for their last bits, and
    in fp32 so are seeded choices of any temperature.
    """
    model = oracle_model(name, seed, tie_word_embeddings=False, **MTP_FIELDS, **fields)
    mtp = oracle_mtp(model, seed)
    table, head = model.model.embed_tokens.weight, model.lm_head.weight
    width = table.shape[1]
    half = width // 2
    for layers in (model.model.layers, mtp.layers):
        for key, tensor in layers.named_parameters():
            if key.endswith(_OUTPUTS):
                tensor[..., : width if silent else half, :] = 0
    successors = _circle(len(table), seed)
    table.mul_(width**0.5 / 2)  # deviation 1
    table[:, -1] = 0
    table[list(wrong), -1] = MARK
    carried = table[:, :half] * (1 + model.model.norm.weight[:half])
    head.zero_()
    head[successors[FIRST:], :half] = SHARPNESS * _unit(carried[FIRST:])
    right = next(token for token in range(FIRST, len(table)) if token not in wrong)
    _pass_the_token(mtp.layers[0], half, table[right, :half], silent)
    mtp.layers[0].post_norm.weight.copy_(model.model.norm.weight)
    model.save_pretrained(directory)
    add_tensors(directory, mtp_tensors(mtp))
    return Copying(tuple(successors), frozenset(wrong))


def _pass_the_token(layer: Any, half: int, other: Tensor, silent: bool) -> None:
    """Let `fc` hand on the embedding; of marked tokens, mostly that of another one."""
    fc, gain = layer.eh_proj.weight, 1 + layer.enorm.weight
    rows = len(fc) if silent else half
    fc[:rows] = 0
    fc[range(rows), range(rows)] = 1 / gain[:rows]
    fc[:half, len(fc) - 1] = other / gain[-1]


def _circle(vocab_size: int, seed: int) -> list[int]:
    """A successor for each token, which leads through all from FIRST on; 0 before."""
    generator = torch.Generator().manual_seed(seed)
    order = (torch.randperm(vocab_size - FIRST, generator=generator) + FIRST).tolist()
    successors = [0] * vocab_size
    for token, after in zip(order, [*order[1:], order[0]], strict=True):
        successors[token] = after
    return successors


def _unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=-1, keepdim=True)
