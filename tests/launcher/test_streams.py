"""`LLM` under several threads and coroutines: streams, cancellation, the engine's own thread."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading
import time
from array import array

import pytest

from tests.launcher.fakes import EOS, FakeEngine, FakeTokenizer, write_checkpoint
from unisono import LLM, SamplingParams
from unisono.launcher.answering import Answer
from unisono.launcher.engine_thread import EngineThread, Job
from unisono.models.config import ConfigError
from unisono.runtime.protocol import Delta, EngineError, RequestRejected, WorkerLost

LONG = SamplingParams(max_tokens=1_000_000)


class EndlessEngine(FakeEngine):
    """Says "x" for ever to a prompt with "endless"; used from one thread after the start."""

    def __init__(self, config, cluster=None):
        super().__init__(config, cluster)
        self.endless: set[int] = set()
        self.users: set[threading.Thread] = set()
        self.most_at_once = 0

    def submit(self, prompt_ids, params, priority=0):
        self.users.add(threading.current_thread())
        request_id = super().submit(prompt_ids, params)
        if b"endless" in bytes(prompt_ids):
            del self._queues[request_id]
            self.endless.add(request_id)
        return request_id

    def abort(self, request_id):
        self.users.add(threading.current_thread())
        super().abort(request_id)
        self.endless.discard(request_id)
        self._queues.pop(request_id, None)

    def poll(self, timeout_s):
        self.users.add(threading.current_thread())
        time.sleep(0.0005)
        self.most_at_once = max(self.most_at_once, len(self.endless))
        words = [Delta(request_id=i, token_ids=array("i", [120])) for i in self.endless]
        return [*words, *super().poll(timeout_s)]


@pytest.fixture
def llm(tmp_path, monkeypatch):
    monkeypatch.setattr(FakeEngine, "made", [], raising=False)
    monkeypatch.setattr("unisono.launcher.offline.Engine", EndlessEngine)
    monkeypatch.setattr("unisono.launcher.offline.Tokenizer", FakeTokenizer)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with LLM(str(write_checkpoint(tmp_path / "model"))) as llm:
        yield llm
    assert FakeEngine.made[0].log == ["enter", "start", "close"]
    assert "engine" not in {thread.name for thread in threading.enumerate()}


def engine() -> EndlessEngine:
    [made] = FakeEngine.made
    assert isinstance(made, EndlessEngine)
    return made


def settle(llm: LLM) -> None:
    """Return when the engine's thread has done all that was asked before."""
    llm.generate("a")


def test_a_stream_is_the_answer_in_pieces(llm):
    stream = llm.stream("naïve")
    pieces = list(stream)
    assert [piece.text for piece in pieces] == list("NAÏVE")
    [whole] = llm.generate("naïve")
    assert stream.answer == whole
    assert llm.stream([{"role": "user", "content": "hi"}]).answer is None
    assert "".join(p.text for p in llm.stream([{"role": "user", "content": "hi"}])) == "HI"


def test_closing_a_stream_aborts_once(llm):
    with llm.stream("endless", LONG) as stream:
        assert next(stream).text == "x"
    stream.close()
    assert list(stream) == []
    settle(llm)
    assert (engine().aborted, engine().endless) == ([101], set())
    assert stream.answer is None


def test_a_dropped_stream_aborts_and_one_never_begun_costs_nothing(llm):
    stream = llm.stream("endless", LONG)
    next(stream)
    unused = llm.stream("endless", LONG)
    del stream, unused
    gc.collect()
    settle(llm)
    assert engine().aborted == [101]
    assert len(engine().params) == 2


def test_a_stop_string_ends_a_stream(llm):
    stream = llm.stream("endless", SamplingParams(stop=("xxx",)))
    assert list(stream) == []
    assert stream.answer is not None
    assert (stream.answer.finish_reason, stream.answer.token_ids) == ("stop", (120,) * 3)
    settle(llm)
    assert engine().aborted == [101]


def test_streams_and_whole_answers_interleave(llm):
    with llm.stream("endless", LONG) as one, llm.stream("endless", LONG) as two:
        assert next(one).text == next(two).text == "x"
        assert llm.generate("between")[0].text == "BETWEEN"
        assert next(one).text == "x"
    settle(llm)
    assert engine().most_at_once == 2


def test_threads_may_share_an_llm(llm):
    texts: dict[int, str] = {}

    def ask(number):
        for _ in range(5):
            [answer] = llm.generate(f"thread {number}")
            texts[number] = answer.text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: f"THREAD {number}" for number in range(6)}
    assert [thread.name for thread in engine().users] == ["engine"]


def test_coroutines_are_batched_and_get_their_own_answers(llm):
    async def read(number):
        async with llm.astream("endless", LONG) as stream:
            count = 0
            async for piece in stream:
                assert piece.text == "x"
                count += 1
                if count == 20 + number:
                    return count
        raise AssertionError("an endless stream ended")

    async def main():
        streams = [read(number) for number in range(4)]
        chat = llm.achat([{"role": "user", "content": "hi"}])
        whole = llm.agenerate(["one", "two"])
        return await asyncio.gather(*streams, chat, whole)

    *counts, chat, (one, two) = asyncio.run(main())
    assert counts == [20, 21, 22, 23]
    assert (chat.text, one.text, two.text) == ("HI", "ONE", "TWO")
    settle(llm)
    assert engine().most_at_once > 1
    assert len(set(engine().aborted)) == len(engine().aborted) == 4


def test_an_async_stream_has_the_answer_at_its_end(llm):
    async def main():
        stream = llm.astream("hello")
        return [piece.text async for piece in stream], stream.answer

    texts, answer = asyncio.run(main())
    assert "".join(texts) == "HELLO"
    assert answer == llm.generate("hello")[0]


@pytest.mark.parametrize("kind", ["agenerate", "achat", "astream"])
def test_cancellation_aborts_exactly_once(llm, kind):
    async def ask():
        if kind == "agenerate":
            await llm.agenerate(["endless", "endless"], LONG)
        elif kind == "achat":
            await llm.achat([{"role": "user", "content": "endless"}], LONG)
        else:
            async for _ in llm.astream("endless", LONG):
                pass

    async def main():
        task = asyncio.create_task(ask())
        while not engine().endless:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    settle(llm)
    assert engine().aborted == ([101, 102] if kind == "agenerate" else [101])


def test_a_lost_engine_reaches_everyone_and_is_not_asked_to_abort(llm):
    with llm.stream("endless", LONG) as stream:
        next(stream)
        with pytest.raises(WorkerLost, match="rank 1 failed"):
            llm.generate("die")
        with pytest.raises(WorkerLost, match="rank 1 failed"):
            list(stream)
    assert engine().aborted == []


def test_closing_ends_the_answers_of_others(llm):
    stream = llm.stream("endless", LONG)
    next(stream)
    llm.close()
    with pytest.raises(EngineError, match="the engine was closed"):
        list(stream)


def test_a_closed_thread_takes_no_more_requests(llm):
    thread = llm._engine
    assert isinstance(thread, EngineThread)
    llm.close()
    with pytest.raises(EngineError, match="the engine was closed"):
        thread.submit(Job(requests=(), params=LONG, sink=lambda news: None))


def test_garbage_may_be_collected_in_the_engines_own_thread(llm):
    """Then `close` runs there: it must neither wait for itself nor leave the engine open."""
    thread = llm._engine
    assert isinstance(thread, EngineThread)
    llm._end.detach()
    llm._engine = llm._end = None
    thread._orders.put(thread.close)
    thread._thread.join(timeout=10)
    assert engine().log[-1] == "close"


@pytest.mark.parametrize("ask", ["stream", "astream"])
def test_bad_requests_are_refused_before_the_first_piece(llm, ask):
    stream = getattr(llm, ask)
    with pytest.raises(RequestRejected, match="the prompt is empty"):
        stream("")
    with pytest.raises(ConfigError, match="--stop 'END': expected a tuple of texts"):
        stream("ok", SamplingParams(stop="END"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least one message"):
        stream([])


def test_the_digest_holds_tokens_and_numerics_and_nothing_else(llm):
    [answer] = llm.generate("hello")
    assert answer.digest == llm.generate("hello")[0].digest
    same = dataclasses.replace(answer, text="?", total_s=9.0, index=3, prompt="p")
    assert same.digest == answer.digest
    changes = [{"numerics": "cuda bfloat16"}, {"token_ids": (*answer.token_ids, EOS)}]
    digests = {dataclasses.replace(answer, **change).digest for change in changes}
    assert len(digests | {answer.digest}) == 3


def test_the_digest_is_the_same_everywhere():
    answer = Answer(
        index=0,
        prompt="p",
        text="t",
        token_ids=(1, 2, 49151),
        finish_reason="stop",
        num_prompt_tokens=1,
        first_token_s=0.0,
        total_s=0.0,
        numerics="cpu float32 tp=1 unisono 0.1.0",
    )
    assert answer.digest == "f28f06c217134422dec02b03a20f0237"
    assert answer.token_s == 0.0
