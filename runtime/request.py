"""One request's life, as counts."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from unisono.runtime.protocol import SamplingParams
from unisono.workers.config import BLOCK_SIZE
from unisono.workers.protocol import int32s


@dataclass(slots=True, eq=False)
class Request:
    """A request and how far it is.

    [0, num_computed)             has its KV in `blocks`, by the results that are in
    [num_computed, next_start)    is computed by the steps in flight, which may accept up to
                                  num_drafts tokens more
    [next_start, num_given)       what its slot was opened with and is still to be planned
    [0, num_tokens)               prompt and answer, as far as they are known here; of an answer
                                  the newest token is not computed yet
    """

    client: str
    request_id: int
    prompt_ids: array[int]
    params: SamplingParams
    max_tokens: int
    """The caller's limit, or less where the context ends first."""
    arrived_s: float
    waited_s: float = 0.0
    """How long ranks had been waited for, in all, when it arrived."""
    checksums: bool = False
    """Its tokens come with a checksum of their logits."""
    priority: int = 0
    """Lower goes first; among equals, the first to come."""
    order: int = 0
    """Its number in the order of arrival."""
    rejects: bool = False
    """Its drafts are judged by rejection sampling."""
    needs_host: bool = False
    """Every token must be seen here before its next one is planned."""
    answer_ids: array[int] = field(default_factory=int32s)
    slot: int = 0
    blocks: list[int] = field(default_factory=list)
    num_sent_blocks: int = 0
    """How many of `blocks` its slot on the workers knows."""
    num_published: int = 0
    """Its first blocks that the prefix cache knows, as its own or as another's equal ones."""
    block_names: list[bytes] = field(default_factory=list)
    num_given: int = 0
    """Tokens its slot was opened with: the prompt, and after a pre-emption the answer so far."""
    num_computed: int = 0
    next_start: int = 0
    """Where its next row begins, at the least."""
    num_drafts: int = 0
    """Drafts of its rows in flight: tokens that may be accepted beside."""
    num_proposed: int = 0
    """Drafts that lie behind its newest token on the ranks, once its rows in flight are done."""
    drafted: array[int] = field(default_factory=int32s)
    """By place in a chain: drafts of it that were checked."""
    accepted: array[int] = field(default_factory=int32s)
    """Those of them that were right."""
    last_step: int = 0
    """The last step that named its slot or its blocks."""
    state: int = 0
    """Its recurrent state on the workers; 0: the model has none."""
    restored: int = 0
    """The snapshot that its state started from; 0: it started empty."""
    num_common: int = 0
    """Its first blocks that others have, too, whether or not their state was saved."""
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache spared it when it was first admitted."""
    first_token_s: float = 0.0
    num_prompt_logprobs: int = 0
    """Prompt tokens, from the second on, whose log-probabilities have come; computed again after
    a pre-emption they are not taken again."""
    prompt_logprobs: array[int] = field(default_factory=int32s)
    """Those that wait for the first token of the answer, to be sent with it."""
    is_watched: bool = field(init=False)
    """Whether more than tokens is wanted of it."""

    def __post_init__(self) -> None:
        self.is_watched = self.checksums or self.params.logprobs is not None

    @property
    def rank(self) -> tuple[int, int]:
        """Its place among all requests: the least is served first and pre-empted last."""
        return self.priority, self.order

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_answered(self) -> int:
        return len(self.answer_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far."""
        return len(self.prompt_ids) + len(self.answer_ids)

    @property
    def in_prompt(self) -> bool:
        """Whether tokens that its slot was opened with are still to be planned."""
        return self.next_start < self.num_given

    @property
    def num_ahead(self) -> int:
        """Tokens that its rows in flight compute for certain."""
        return self.next_start - self.num_computed

    @property
    def most_computed(self) -> int:
        """Tokens that are computed when all steps in flight are done, at the most."""
        return self.next_start + self.num_drafts

    @property
    def num_left(self) -> int:
        """Tokens still to be computed after the steps in flight, at the least."""
        return len(self.prompt_ids) + self.max_tokens - 1 - self.next_start - self.num_drafts

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether positions of its prompt are still to be computed, wherever their KV may be."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    @property
    def max_blocks(self) -> int:
        """Blocks it needs at the most: the last token of an answer is never computed."""
        return blocks_for(self.num_prompt_tokens + self.max_tokens - 1)

    def count_drafts(self, checked: int, right: int) -> None:
        """Of a chain of `checked` drafts the first `right` were right."""
        missing = checked - len(self.drafted)
        self.drafted.extend([0] * missing)
        self.accepted.extend([0] * missing)
        for place in range(checked):
            self.drafted[place] += 1
            self.accepted[place] += place < right

    def tokens(self, start: int, stop: int) -> array[int]:
        """Return the tokens at positions [start, stop) of prompt and answer."""
        prompt = self.num_prompt_tokens
        return (
            self.prompt_ids[start:stop]
            + self.answer_ids[max(start - prompt, 0) : max(stop - prompt, 0)]
        )


def blocks_for(num_tokens: int) -> int:
    """KV blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_SIZE)
