"""What the runtime serves: requests in, tokens out. Torch-free; both sets are closed."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from unisono.workers.protocol import StepPlan, StepsSeen, WatchSteps, int32s


class EngineError(Exception):
    """Root of what a caller may see.

    EngineError
      RequestRejected    the caller can fix the request: too long, unknown option
      CapacityExceeded   try later: no blocks or slots
      WorkerLost         a process died or raised; names rank and phase
    ConfigError          an option or a file of the user is wrong (models/config.py): exit code 2
      PartitionError     a rank count that leaves a rank empty (models/partition.py)
      CheckpointError    a weight file is missing, damaged or of another model (models/headers.py)
    """


class RequestRejected(EngineError):
    """The request can never be served as it is; the message says which number is too large."""


class CapacityExceeded(EngineError):
    """The engine is full; the same request may be served later."""


class WorkerLost(EngineError):
    """A process of the engine died or raised; the engine must stop. The message is one line.

    `rank`: whose fault it is, -1 for the runtime. `phase` and `step`: where it was, as far as is
    known (step -1: before the first). `error` and `traceback`: the type and the traceback of its
    own exception, empty if it died without one. `flight`: the file with the last steps, if any.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int = -1,
        phase: str = "",
        step: int = -1,
        error: str = "",
        traceback: str = "",
        flight: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.phase = phase
        self.step = step
        self.error = error
        self.traceback = traceback
        self.flight = flight


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How an answer is chosen and where it ends.

    Temperature 0 is greedy: the likeliest token, the lowest id on ties. Above 0 each token is
    drawn from softmax(logits / temperature), after top-k, top-p and min-p in this order. What is
    drawn depends on seed, prompt and position alone, unless drafts may be rejected. Penalties,
    then biases, change the logits before all that, for greedy answers too.
    """

    max_tokens: int = 256
    """Most tokens of one answer."""
    ignore_eos: bool = False
    """Go on past the model's end-of-text tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Further token ids that end an answer, like the model's own."""
    temperature: float = 0.0
    """Divides the logits before a token is drawn; 0 takes the likeliest token, always."""
    top_k: int = 0
    """Draw from this many likeliest tokens only; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens whose probabilities sum up to this."""
    min_p: float = 0.0
    """Draw only tokens that are at least this many times as likely as the likeliest."""
    seed: int | None = None
    """Same seed, prompt and options: same answer. Unset: every answer has its own."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in prompt or answer and multiplies negative ones."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the answer has."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token as often as the answer has it."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids and what is added to their logits."""
    min_tokens: int = 0
    """No end-of-text token and no stop id comes before the answer has this many tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, which is cut before them; may be given several times."""
    logprobs: int | None = None
    """Also give the log-probability of each token, and of so many likeliest ones at its place, up
    to 20: the model's own, before penalties, biases, temperature and filters. Commands show it as
    JSON only."""
    prompt_logprobs: int | None = None
    """The same for every token of the prompt but the first, which nothing predicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A request: prompt token ids and how to answer them."""

    request_id: int
    prompt_ids: array[int]
    params: SamplingParams
    priority: int = 0
    """Lower goes first, and may take the place of what runs; it changes no answer."""
    checksums: bool = False
    """Give with each token a checksum of the logits that it comes from."""
    rejects: bool = False
    """Judge its drafts by rejection sampling: what is drawn follows from no seed."""
    more: bool = False
    """Another request comes at once: wait a little, so that they are admitted together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Forget the request; nothing more is sent for it."""

    request_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the runtime and its workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed:
    """A process of the engine is gone, as the launcher sees it: write the flight and end."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """Have the ranks run this step, recorded or made up, of an engine that serves nobody."""

    plan: StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Reschedule:
    """Forget what is cached and go on within these limits, while nobody is served. Echoed."""

    num_blocks: int
    max_step_tokens: int
    prefix_cache: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """Give memory back between two steps: level 1 that of KV and states, 2 that of weights too.

    Requests keep their tokens and wait. An engine that sleeps may go deeper, and no higher.
    """

    level: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake:
    """Take the memory again and go on. An engine that is awake does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """Between two steps take the weights of `path`, of the same architecture and shapes.

    Requests that run are computed again with them, from the tokens they have. Asleep without
    weights, they are taken at the next `Wake`. Fields as in `LoadWeights`.
    """

    path: str
    load_format: str


Order = Sleep | Wake | Reload
"""Each is answered by one `EngineState`, in order."""
CLIENT_MESSAGES = (Submit, Abort, Stop, Crashed, Rerun, Reschedule, WatchSteps, Sleep, Wake, Reload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Starting:
    """Start-up news of one rank, for a progress bar."""

    rank: int
    phase: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """Every rank is ready. Measured facts: the fewest blocks, the most bytes of any rank."""

    num_blocks: int
    block_size: int
    device: str
    dtype: str
    rank_pids: array[int]
    weight_bytes: int = 0
    activation_bytes: int = 0
    """What the largest step takes for a while; 0: not measured."""
    block_bytes: int = 0
    """Of one KV block, all layers."""
    num_states: int = 0
    """Recurrent states of requests and snapshots; 0: the model has none."""
    state_bytes: int = 0
    """Of one recurrent state, all layers."""
    max_requests: int = 0
    """Requests that run at the same time: fewer than were asked for where states are short."""
    graph_bytes: int = 0
    """Of the graphs that were captured at start-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The next token of each of `request_ids`, all at once; one may be named again.

    Of requests that want nothing but tokens, behind the `Delta` with their first.
    """

    request_ids: array[int]
    token_ids: array[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New tokens of a request, in order: its first, or all where more than tokens is wanted.

    `logprobs`, where they were asked for: `logprob_width` items of each token. `prompt_logprobs`:
    with the first tokens, those of the prompt from its second token on. Layout: `logprob_width`
    in workers/protocol.py. `checksums`, where they were asked for: one int64 for each token.
    """

    request_id: int
    token_ids: array[int]
    num_cached_tokens: int = 0
    """As in `Finished`, which does not come where the launcher ends the answer."""
    logprobs: array[int] | None = None
    prompt_logprobs: array[int] | None = None
    checksums: array[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A request's end. `reason`: stop (EOS or a stop id) or length.

    Times are seconds since the runtime received the request.
    """

    request_id: int
    reason: str
    num_prompt_tokens: int
    num_tokens: int
    first_token_s: float
    total_s: float
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache spared it."""
    num_preemptions: int = 0
    """How often it lost its place to others and was computed again; pauses do not count."""
    drafted: array[int] = field(default_factory=int32s)
    """By place in a chain: drafts of it that were checked."""
    accepted: array[int] = field(default_factory=int32s)
    """Those of them that were right, each behind others that were."""
    waited_s: float = 0.0
    """Of `total_s`, what the runtime spent waiting for the ranks."""
    num_replays: int = 0
    """Graphs that a rank has replayed by then, for all requests."""
    eager: tuple[tuple[str, int], ...] = ()
    """By reason: pieces of steps that were no replays by then, for all requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The request can never be served; `message` says why, with the numbers."""

    request_id: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The engine is lost. `rank` -1: the runtime itself."""

    rank: int
    phase: str
    step: int
    error: str
    message: str
    traceback: str
    secondary: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Before the first `Failed`, or in answer to `Crashed`: the last steps are in the file `path`.

    Empty: there were none, or it could not be written.
    """

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The tokens of the step of a `Rerun`, in row order."""

    step: int
    tokens: array[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """Answer to an `Order`: the engine sleeps at `level` now, or serves where that is 0.

    `error`: why weights could not be loaded, with the rank; all is as it was before. `took`: the
    seconds in which nobody was served for it, by what they went into.
    """

    level: int = 0
    error: str = ""
    took: tuple[tuple[str, float], ...] = field(default=(), compare=False)


ENGINE_EVENTS = (
    Starting,
    EngineReady,
    Tokens,
    Delta,
    Finished,
    Rejected,
    Failed,
    Recorded,
    Replayed,
    StepsSeen,
    Reschedule,
    EngineState,
)
