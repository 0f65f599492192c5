"""`unisono verify --against transformers`: the plain answers beside another program's opinion."""

from __future__ import annotations

import importlib.util
import secrets
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from unisono.launcher.cluster import SESSION_VARIABLE
from unisono.launcher.model_source import ModelSource
from unisono.launcher.private_directory import PrivateDirectory
from unisono.launcher.process_table import ProcessSpec
from unisono.launcher.supervisor import Supervisor
from unisono.launcher.verify.compare import ORACLE
from unisono.launcher.verify.oracle_process import (
    ORACLE_REPORTS,
    PROCESS,
    OracleAnswer,
    OracleFailed,
    OracleOrders,
)
from unisono.launcher.verify.run import NUM_TOP
from unisono.models.config import ConfigError
from unisono.runtime.protocol import EngineError
from unisono.workers.channel import Hub
from unisono.workers.config import WorkerConfig
from unisono.workers.protocol import int32s, logprob_width

ENTRY = "unisono.launcher.verify.oracle_process:main"
FLAG = f"--against {ORACLE}"
_GRACE_S = 2.0
_WATCH_S = 0.1


class OracleBroken(EngineError):
    """The other program could not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """Where transformers finds the model, and how it is run."""

    source: ModelSource
    device: str
    threads: int
    silence_s: float
    """Longest time without a word, such as loading takes."""


def check_oracle(
    source: ModelSource, worker: WorkerConfig, dtypes: Iterable[str], longest: int
) -> None:
    """Raise ConfigError if transformers cannot be asked about requests of `longest` tokens."""
    if source.kind == "shape" or worker.load_format == "random":
        raise ConfigError(
            f"{FLAG}: the weights of {source.name} are random here, and transformers would draw "
            "others; name a checkpoint with weights"
        )
    if worker.overlay:
        raise ConfigError(
            f"{FLAG}: --overlay {worker.overlay} replaces weights here and not there; leave out one"
        )
    needed = ("transformers", "accelerate") if source.kind == "gguf" else ("transformers",)
    for name in needed:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"{FLAG}: {name} is not installed; run pip install {name}")
    coarse = [dtype for dtype in dtypes if dtype != "float32"]
    if worker.model.experts is not None and coarse:
        raise ConfigError(
            f"{FLAG}: in {coarse[0]} a near tie sends a token to other experts than in float32, "
            "which no bound on rounding covers; choose --dtype float32"
        )
    rope = worker.model.rope
    border = rope.original_max_position_embeddings or worker.model.max_position_embeddings
    if rope.rope_type in ("dynamic", "longrope") and longest > border:
        raise ConfigError(
            f"{FLAG}: rotary embedding of type {rope.rope_type} changes its frequencies there as a "
            f"request grows past {border} tokens, and here for all requests once one is longer; "
            f"the longest has {longest}"
        )


def ask_oracle(
    oracle: Oracle,
    sequences: Sequence[Sequence[int]],
    forced: Sequence[array[int]],
    environ: Mapping[str, str],
) -> Iterator[array[int]]:
    """Yield for each of `sequences` what `judge_oracle` takes, about the ids of `forced`.

    Raises OracleBroken.
    """
    session = secrets.token_hex(16)
    path = oracle.source.path
    is_file = oracle.source.kind == "gguf"
    with (
        PrivateDirectory() as directory,
        Hub(directory.endpoint(PROCESS), ORACLE_REPORTS, session) as hub,
    ):
        orders = OracleOrders(
            directory=str(path.parent if is_file else path),
            gguf_file=path.name if is_file else "",
            device=oracle.device,
            threads=oracle.threads,
            endpoint=directory.endpoint(PROCESS),
            session=session,
            num_ids=NUM_TOP,
            sequences=tuple(map(int32s, sequences)),
            ids=tuple(map(_ids_of, forced)),
        )
        env = {SESSION_VARIABLE: session, "OMP_NUM_THREADS": str(oracle.threads)}
        env["TQDM_DISABLE"] = "1"  # progress is ours to show
        spec = ProcessSpec(name=PROCESS, entry=ENTRY, orders=orders, env=env)
        with Supervisor([spec], _GRACE_S) as processes:
            processes.start()
            for index in range(len(sequences)):
                yield _next_answer(hub, processes, index, oracle.silence_s)


def _next_answer(hub: Hub, processes: Supervisor, index: int, silence_s: float) -> array[int]:
    deadline = time.monotonic() + silence_s
    while time.monotonic() < deadline:
        ended = processes.poll()
        match hub.receive(_WATCH_S):
            case (_, OracleAnswer() as answer):
                assert answer.index == index, answer
                return answer.logprobs
            case (_, OracleFailed(message=message)):
                raise OracleBroken(" ".join(message.split()))
            case None if ended:
                how = f"signal {ended[0].signal}" if ended[0].signal else f"code {ended[0].code}"
                raise OracleBroken(f"its process ended with {how}")
    raise OracleBroken(f"it said nothing for {silence_s:g} s")


def _ids_of(logprobs: array[int]) -> array[int]:
    """The likeliest ids of each place, from log-probabilities as they travel."""
    width = logprob_width(NUM_TOP)
    ids = int32s()
    for at in range(0, len(logprobs), width):
        ids += logprobs[at + 2 : at + width : 2]
    return ids
