"""`LLM` in a script, in front of an engine that answers each prompt in capitals."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading

import pytest

import unisono
from tests.launcher.fakes import EOS, TOOK, FakeEngine, FakeTokenizer, write_checkpoint
from unisono import LLM, SamplingParams
from unisono.launcher.answering import Answer
from unisono.launcher.pause import Pause
from unisono.models.config import ConfigError
from unisono.models.headers import CheckpointError
from unisono.models.partition import PartitionError
from unisono.runtime.protocol import EngineError, Reload, RequestRejected, Sleep, Wake, WorkerLost


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(FakeEngine, "made", [], raising=False)
    monkeypatch.setattr("unisono.launcher.offline.Engine", FakeEngine)
    monkeypatch.setattr("unisono.launcher.offline.Tokenizer", FakeTokenizer)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return str(write_checkpoint(tmp_path / "model"))


def test_generate_continues_prompts_in_order(model):
    with LLM(model, tp=2, max_requests=3) as llm:
        answers = llm.generate(["a long one", "b"], SamplingParams(max_tokens=100))
        [single] = llm.generate("c")
    assert [(each.index, each.prompt, each.text) for each in answers] == [
        (0, "a long one", "A LONG ONE"),
        (1, "b", "B"),
    ]
    assert single == Answer(
        index=0,
        prompt="c",
        text="C",
        token_ids=(67, EOS),
        finish_reason="stop",
        num_prompt_tokens=1,
        first_token_s=0.5,
        total_s=0.6,
        numerics=f"cpu float32 tp=2 attn=tiled numerics=exact unisono {unisono.__version__}",
    )
    assert single.token_s == pytest.approx(0.1)
    [engine] = FakeEngine.made
    assert (engine.config.runtime.worker.tp, engine.config.runtime.worker.max_requests) == (2, 3)
    assert engine.params[-1] == SamplingParams()
    assert engine.log == ["enter", "start", "close"]


def test_nothing_and_one_text_are_not_confused(model):
    with LLM(model) as llm:
        assert llm.generate([]) == []
        assert len(llm.generate("two words")) == 1


def test_chat_goes_through_the_template(model):
    with LLM(model) as llm:
        answer = llm.chat([{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}])
    assert (answer.prompt, answer.text) == ("hi", "HI")
    assert answer.num_prompt_tokens == len("<system>s<user>hi<assistant>")


def test_chat_without_a_template_is_refused(model, tmp_path):
    (tmp_path / "model" / "no_template").touch()
    llm = LLM(model)
    with pytest.raises(ConfigError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_the_ranks_start_with_the_first_prompt_and_end_with_close(model):
    llm = LLM(model)
    assert FakeEngine.made == []
    llm.generate("a")
    llm.generate("b")
    assert [engine.log for engine in FakeEngine.made] == [["enter", "start"]]
    llm.close()
    llm.close()
    assert [engine.log for engine in FakeEngine.made] == [["enter", "start", "close"]]
    assert llm.generate("c")[0].text == "C"
    llm.close()
    assert len(FakeEngine.made) == 2


def test_a_dropped_llm_closes_its_engine(model):
    llm = LLM(model)
    llm.generate("a")
    del llm
    gc.collect()
    assert FakeEngine.made[0].log[-1] == "close"


def test_a_failed_start_closes_the_engine(model, monkeypatch):
    def fail(self, on_progress):
        raise WorkerLost("rank 0 failed in load")

    monkeypatch.setattr(FakeEngine, "start", fail)
    with pytest.raises(WorkerLost), LLM(model):
        pass
    assert FakeEngine.made[0].log == ["enter", "close"]


def test_an_engine_error_reaches_the_script(model):
    with LLM(model) as llm, pytest.raises(WorkerLost, match="rank 1 failed"):
        llm.generate("die")


def test_a_prompt_that_the_engine_refuses_gets_an_answer_that_says_so(model):
    with LLM(model) as llm:
        rejected, served = llm.generate(["reject me", "serve me"])
    assert (rejected.finish_reason, rejected.error) == ("rejected", "needs 9 blocks, there are 8")
    assert served.text == "SERVE ME"


@pytest.mark.parametrize(
    ("prompts", "params", "error", "message"),
    [
        (["ok", "x" * 128], None, RequestRejected, "prompt 2 of 2 has 128 tokens"),
        ("", None, RequestRejected, "the prompt is empty"),
        ("ok", SamplingParams(max_tokens=0), ConfigError, "--max-tokens 0: must be at least 1"),
        ("ok", SamplingParams(stop_token_ids=(999,)), ConfigError, "--stop-token-ids 999"),
    ],
    ids=str,
)
def test_bad_requests_are_refused_before_anything_starts(model, prompts, params, error, message):
    llm = LLM(model)
    with pytest.raises(error, match=message):
        llm.generate(prompts, params)
    assert FakeEngine.made == []


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": 1.0}, ConfigError, "unknown option 'temperature': choose from tp, dtype"),
        ({"tp": 10}, PartitionError, "legal rank counts"),
        ({"tp": "2"}, ConfigError, "--tp '2': expected a whole number"),
        ({"dtype": "float16"}, ConfigError, "on cpu choose float32 or bfloat16"),
    ],
    ids=str,
)
def test_bad_options_are_refused_by_the_constructor(model, options, error, message):
    with pytest.raises(error, match=message):
        LLM(model, **options)


def test_a_script_under_torchrun_is_refused(model, monkeypatch):
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="LLM starts its own ranks"):
        LLM(model)
    monkeypatch.setenv("WORLD_SIZE", "1")
    LLM(model)


def test_it_sleeps_while_another_thread_waits_and_goes_on(model, tmp_path):
    other = str(write_checkpoint(tmp_path / "other"))
    got = []
    with LLM(model) as llm:
        llm.sleep(2)
        thread = threading.Thread(target=lambda: got.extend(llm.generate(["abc", "de"])))
        thread.start()
        llm.reload_weights(other)
        thread.join(0.05)
        assert thread.is_alive()
        asyncio.run(llm.wake_async())
        thread.join()
    assert [answer.text for answer in got] == ["ABC", "DE"]
    [engine] = FakeEngine.made
    reload = Reload(path=other, load_format="auto")
    assert engine.ordered == [Sleep(level=2), reload, Wake()]


@pytest.mark.parametrize("level", [0, 3, True, "1", 1.0])
def test_another_level_is_refused_before_anything_starts(model, level):
    llm = LLM(model)
    with pytest.raises(ConfigError, match=r"^sleep level .*: choose 1 .* or 2 "):
        llm.sleep(level)
    with pytest.raises(ConfigError, match=r"^sleep level .*: choose 1 .* or 2 "):
        asyncio.run(llm.sleep_async(level))
    assert FakeEngine.made == []


def test_orders_say_how_long_requests_waited_and_for_how_long_at_the_most(model, tmp_path):
    """B36."""
    other = str(write_checkpoint(tmp_path / "other"))
    with LLM(model, start_timeout_s=7.5) as llm:
        pauses = [llm.sleep(), llm.reload_weights(other), llm.wake()]
        pauses += [asyncio.run(twin) for twin in (llm.sleep_async(), llm.wake_async())]
        pauses.append(asyncio.run(llm.reload_weights_async(other)))
    assert pauses == [Pause(parts=dict(TOOK), limit_s=7.5)] * 6
    assert pauses[0].seconds == 0.25 + 1.5 + 0.001
    assert str(pauses[0]) == (
        "1.75 s (0.25 s steps in flight, 1.50 s giving memory back), 7.5 s at the most"
    )
    assert str(Pause(parts={}, limit_s=600.0)) == "0.00 s, 600 s at the most"


def test_what_ranks_cannot_load_is_an_error_and_the_engine_serves_on(model, tmp_path):
    with LLM(model) as llm:
        with pytest.raises(CheckpointError, match=r"^rank 1: torn$"):
            llm.reload_weights(str(write_checkpoint(tmp_path / "torn")))
        assert llm.generate("a")[0].text == "A"
        with pytest.raises(WorkerLost, match="rank 1 died"):
            llm.reload_weights(str(write_checkpoint(tmp_path / "deadly")))


def test_closing_ends_whoever_waits_for_an_order(model, monkeypatch):
    monkeypatch.setattr(FakeEngine, "order", lambda self, wanted: None)
    raised = []

    def wait(llm):
        with pytest.raises(EngineError) as caught:
            llm.sleep()
        raised.append(str(caught.value))

    with LLM(model) as llm:
        thread = threading.Thread(target=wait, args=(llm,))
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
    thread.join()
    assert raised == ["the engine was closed while an answer was wanted"]


def test_the_public_package_is_lazy():
    source = (
        "import sys, unisono\n"
        "assert not [name for name in sys.modules if name.startswith('unisono.')]\n"
        "unisono.LLM\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout == "False\n"
    assert unisono.LLM is LLM
