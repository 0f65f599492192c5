"""One request's life, as counts."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from unisono.runtime.protocol import SamplingParams
from unisono.workers.config import BLOCK_SIZE


@dataclass(slots=True, eq=False)
class Request:
    """A request and how far it is.

    [0, num_computed) has its KV in the cache; the next step computes from there. After the
    prompt, the newest token is always the one position that is not computed yet.
    """

    client: str
    request_id: int
    prompt_ids: array[int]
    params: SamplingParams
    max_tokens: int
    """The caller's limit, or less where the context ends first."""
    arrived_s: float
    slot: int = 0
    blocks: list[int] = field(default_factory=list)
    num_reserved: int = 0
    """Blocks set aside for it and not taken yet."""
    num_computed: int = 0
    num_answered: int = 0
    first_token_s: float = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def in_prompt(self) -> bool:
        """Whether prompt tokens are still to be computed."""
        return self.num_computed < self.num_prompt_tokens

    @property
    def max_blocks(self) -> int:
        """Blocks it needs at the most: the last token of an answer is never computed."""
        return blocks_for(self.num_prompt_tokens + self.max_tokens - 1)


def blocks_for(num_tokens: int) -> int:
    """KV blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_SIZE)
