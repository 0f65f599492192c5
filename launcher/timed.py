"""The launcher's parts that note what they do, for `--trace`. Without it none of this runs."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import unisono
from unisono.launcher.answering import TokenStream, TokenText
from unisono.launcher.cluster import ClusterFacts
from unisono.launcher.config import LaunchConfig
from unisono.launcher.engine_client import Engine, Event
from unisono.launcher.process_table import process_name
from unisono.launcher.timeline_file import LAUNCHER, RUNTIME, Lane, write_trace
from unisono.models.config import ConfigError
from unisono.runtime.protocol import (
    Delta,
    EngineError,
    EngineReady,
    Finished,
    Order,
    Rejected,
    Starting,
    Tokens,
)
from unisono.workers.timeline import (
    MOST_EVENTS,
    Kind,
    Timeline,
    decode,
    make_ring,
    name_of,
    now,
    ring_bytes,
)

_log = logging.getLogger(__name__)


class TimedEngine(Engine):
    """An engine that notes what is asked of it and answered, and writes the file at its end.

    The file is written once every process is gone, also where the engine fails. `close` raises
    EngineError if it cannot be, unless something else has gone wrong already.
    """

    def __init__(
        self, config: LaunchConfig, cluster: ClusterFacts | None = None, **options: Any
    ) -> None:
        super().__init__(config, cluster, **options)
        self.timeline = Timeline(bytearray(ring_bytes(MOST_EVENTS)))
        self._path, self._worker = Path(config.trace), config.runtime.worker
        self._rings: dict[str, BinaryIO] = {}
        self._num_tokens: dict[int, int] = {}

    def start(self, on_progress: Callable[[Starting], None] | None = None) -> EngineReady:
        began = now()
        try:
            return super().start(on_progress)
        finally:
            self.timeline.span(Kind.START, began)

    def submit(self, prompt_ids: Sequence[int], *asked: Any, **how: Any) -> int:
        began = now()
        number = super().submit(prompt_ids, *asked, **how)
        self.timeline.span(Kind.SUBMIT, began, number, len(prompt_ids))
        self._num_tokens[number] = 0
        return number

    def abort(self, request_id: int) -> None:
        self.timeline.moment(Kind.ABORT, request_id)
        self._num_tokens.pop(request_id, None)
        super().abort(request_id)

    def order(self, wanted: Order) -> None:
        self.timeline.moment(Kind.ORDER, self.timeline.text(name_of(wanted)))
        super().order(wanted)

    def poll(self, timeout_s: float) -> list[Event]:
        began = now()
        events = super().poll(timeout_s)
        if events:
            self.timeline.span(Kind.POLL, began, len(events))
        for event in events:
            # Of a request that was aborted some tokens may still come.
            if isinstance(event, Tokens):
                for number in event.request_ids:
                    if number in self._num_tokens:
                        self._come(number, 1)
            elif event.request_id in self._num_tokens:
                self._note(event)
        return events

    def _note(self, event: Delta | Finished | Rejected) -> None:
        number = event.request_id
        match event:
            case Delta(token_ids=tokens):
                self._come(number, len(tokens))
            case Finished() | Rejected():
                reason = event.reason if isinstance(event, Finished) else "rejected"
                known = self._num_tokens.pop(number)
                self.timeline.moment(Kind.FINISH, number, known, self.timeline.text(reason))

    def _come(self, number: int, num_tokens: int) -> None:
        if not self._num_tokens[number]:
            self.timeline.moment(Kind.FIRST_TOKEN, number)
        self._num_tokens[number] += num_tokens

    def close(self) -> None:
        try:
            super().close()
        finally:
            if os.getpid() == self._owner_pid:
                rings, self._rings = self._rings, {}
                with ExitStack() as opened:
                    for ring in rings.values():
                        opened.enter_context(ring)
                    self._write(rings)

    def _created(self, directory: Path) -> None:
        try:
            for rank in range(-1, self._worker.tp):
                name = process_name(rank)
                self._rings[name] = make_ring(directory, name)
        except OSError as error:
            megabytes = (self._worker.tp + 1) * ring_bytes(MOST_EVENTS) / 1e6
            raise ConfigError(
                f"--trace {self._path}: needs {megabytes:.0f} MB in {directory.parent} "
                f"({error.strerror}); set TMPDIR to a directory with room"
            ) from None

    def _write(self, rings: Mapping[str, BinaryIO]) -> None:
        """Write the file, unless nothing was started or it is written."""
        if not rings or self._supervisor is None or not self._supervisor.pids():
            return
        lanes, missing = [Lane(LAUNCHER, "launcher", self.timeline.recorded())], {}
        for number, (name, ring) in enumerate(rings.items(), start=RUNTIME):
            ring.seek(0)
            recorded = decode(ring.read())
            if recorded is None:
                missing[name] = self._why_missing()
            else:
                lanes.append(Lane(number, name, recorded))
        facts = {
            "unisono": unisono.__version__,
            "model": Path(self._worker.model_path).name,
            "ranks": self._worker.tp,
            "device": self._worker.device,
            "dtype": self._worker.dtype,
            "missing": missing,
            "failed": "" if self._lost is None else str(self._lost),
        }
        is_failing = sys.exception() is not None
        try:
            count = write_trace(self._path, lanes, facts)
        except OSError as error:
            what = f"the trace {self._path} cannot be written: {error.strerror}"
            if not is_failing:
                raise EngineError(what) from None
            _log.error("%s", what)
        else:
            self._tell(count, lanes, missing)

    def _why_missing(self) -> str:
        if self._cluster is not None and not self._cluster.single_host:
            return "on another host, which has another clock"
        return "ended before it noted anything"

    def _tell(self, count: int, lanes: Sequence[Lane], missing: dict[str, str]) -> None:
        _log.info("%s: %d events of %d processes", self._path, count, len(lanes))
        for name, why in missing.items():
            _log.warning("%s: nothing of %s: %s", self._path, name, why)
        for lane in lanes:
            if lane.recorded.num_dropped:
                _log.warning(
                    "%s: of %s the last %d events, %d older ones were dropped",
                    *(self._path, lane.name, len(lane.recorded.events)),
                    lane.recorded.num_dropped,
                )


class TimedText:
    """A tokenizer whose streams note how long text takes to be made."""

    def __init__(self, tokenizer: TokenText, timeline: Timeline) -> None:
        self._tokenizer, self._timeline = tokenizer, timeline

    def stream(self) -> TokenStream:
        """As the tokenizer's."""
        return _TimedStream(self._tokenizer.stream(), self._timeline)

    def token_bytes(self, token_id: int) -> bytes:
        """As the tokenizer's."""
        return self._tokenizer.token_bytes(token_id)


class _TimedStream:
    def __init__(self, stream: TokenStream, timeline: Timeline) -> None:
        self._stream, self._timeline = stream, timeline

    def push(self, ids: Iterable[int]) -> str:
        began, tokens = now(), tuple(ids)
        text = self._stream.push(tokens)
        self._timeline.span(Kind.DETOKENIZE, began, len(tokens))
        return text

    def flush(self) -> str:
        began = now()
        text = self._stream.flush()
        self._timeline.span(Kind.DETOKENIZE, began, 0)
        return text


def text_for(engine: Engine, tokenizer: TokenText) -> TokenText:
    """What makes text of the answers of `engine`."""
    if isinstance(engine, TimedEngine):
        return TimedText(tokenizer, engine.timeline)
    return tokenizer
