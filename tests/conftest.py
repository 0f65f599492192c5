"""What every test gets: fixed seeds, an alarm, and proof that it left nothing behind."""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

DEFAULT_LIMIT_S = 120.0
LEAVE_GRACE_S = 5.0
"""Seconds that processes of a test have to end by themselves after it."""
SESSION_MARK = "UNISONO_TEST_SESSION"
"""Environment variable by which children, grandchildren and orphans of this run are known."""
SHORT = "models"
"""Folder of tests in files that take a few seconds at the most."""
_STATE = pytest.StashKey["_Session"]()
_HAS_PSUTIL = importlib.util.find_spec("psutil") is not None


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background jobs with SIGINT ignored, and children would inherit it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[_STATE] = _Session()
    if _only_deals_out(config):
        return
    # Hundreds of thousands of objects are made until the tests are there, and stay to the end.
    gc.disable()
    if not _cuda_is_there():
        # Read when a kernel is defined: without a GPU, Triton's interpreter runs it.
        os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import settings

        settings.register_profile("unisono", derandomize=True, deadline=None, database=None)
        settings.load_profile("unisono")


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()
    config.stash[_STATE].close()


def pytest_report_header() -> list[str]:
    return [] if _HAS_PSUTIL else ["psutil is missing: leftover processes are not looked for"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shard", metavar="I/N", help="only test I, I + N, I + 2 N, ... of those asked"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Files are dealt out in this order: with short ones last, nobody waits for a long one.
    items.sort(key=lambda item: item.path.parent.name == SHORT)
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu and not _cuda_is_there():
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    if shard := config.getoption("--shard"):
        part, parts = map(int, shard.split("/"))
        others = [item for number, item in enumerate(items) if number % parts != part]
        config.hook.pytest_deselected(items=others)
        items[:] = items[part::parts]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    left = session.config.stash[_STATE].leftovers(grace_s=LEAVE_GRACE_S)
    if left:
        print(f"\nleft behind by the test session: {', '.join(sorted(left))}", file=sys.stderr)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with _Alarm(item, "setup"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with _Alarm(item, "call"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with _Alarm(item, "teardown"):
        return (yield)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Seed every generator that is loaded, so that a test sees the same numbers in any order."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which a process or a private directory of unisono is still there.

    What a module- or session-scoped fixture holds was there before, and is judged at the end of
    the session.
    """
    state = request.config.stash[_STATE]
    before = state.leftovers()
    yield
    left = state.leftovers(grace_s=LEAVE_GRACE_S, known=before)
    if left:
        pytest.fail(f"left behind: {', '.join(sorted(left))}", pytrace=False)


@pytest.fixture
def nan_filled_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch.empty and its kin return poison: NaN, or the largest value of an integer dtype."""
    import torch

    for owner, name in [
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch, "empty_permuted"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ]:
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


class _Alarm:
    """Ends a phase that takes too long: first as a failure, then, if C code hangs, the run."""

    def __init__(self, item: pytest.Item, phase: str) -> None:
        marker = item.get_closest_marker("timeout")
        self._seconds = float(marker.args[0]) if marker else DEFAULT_LIMIT_S
        self._what = f"{item.nodeid} ({phase})"
        self._stderr = item.config.stash[_STATE].stderr

    def __enter__(self) -> None:
        self._previous = signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)
        faulthandler.dump_traceback_later(2 * self._seconds + 30, exit=True, file=self._stderr)

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._previous)

    def _ring(self, _signal: int, _frame: FrameType | None) -> None:
        faulthandler.dump_traceback(file=self._stderr, all_threads=True)
        pytest.fail(f"{self._what} ran past its limit of {self._seconds:g} s")


class _Session:
    """What this run may leave behind, and where: a temporary directory and a mark of its own.

    The directory is short because a socket path inside it may hold 107 characters at most.
    """

    def __init__(self) -> None:
        self.stderr = os.dup(2)
        self._environ = {name: os.environ.get(name) for name in ("TMPDIR", SESSION_MARK)}
        # pytest's own directories outlive the run, so that a failure can be looked into.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        self._directory = Path(tempfile.mkdtemp(prefix="ut-"))
        self._others = _pids()
        self._mark = uuid.uuid4().hex
        os.environ["TMPDIR"] = tempfile.tempdir = str(self._directory)
        os.environ[SESSION_MARK] = self._mark

    def leftovers(
        self, grace_s: float = 0.0, known: frozenset[str] = frozenset()
    ) -> frozenset[str]:
        """What is there now and not in `known`, after waiting up to `grace_s` for it to go."""
        deadline = time.monotonic() + grace_s
        while True:
            left = self._directories() | self._processes()
            if left <= known or time.monotonic() >= deadline:
                return left - known
            time.sleep(0.02)

    def close(self) -> None:
        """End what is left and give the environment back."""
        for process in self._marked():
            process.kill()
        shutil.rmtree(self._directory, ignore_errors=True)
        for name, value in self._environ.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        tempfile.tempdir = None
        os.close(self.stderr)

    def _directories(self) -> frozenset[str]:
        return frozenset(str(path) for path in self._directory.glob("unisono*"))

    def _processes(self) -> frozenset[str]:
        return frozenset(map(_name_of, self._marked()))

    def _marked(self) -> list[Any]:
        """Processes with the mark of this run, whoever is their parent now.

        Two looks a test: what was there before the run, or once had another environment, is passed
        over while it lives.
        """
        pids = _pids()
        self._others &= pids
        new = [process for pid in pids - self._others if (process := _process(pid))]
        if not new:
            return []
        import psutil

        children = set(psutil.Process().children(recursive=True))
        marked = []
        for process in new:
            environ = _environ_of(process)
            if process in children or environ.get(SESSION_MARK) == self._mark:
                marked.append(process)
            elif environ:
                self._others.add(process.pid)
        return [process for process in marked if _is_ours(process)]


def _pids() -> set[int]:
    """Of all processes but this one; none where nobody can look."""
    if not _HAS_PSUTIL:
        return set()
    import psutil

    return {*psutil.pids()} - {os.getpid()}


def _process(pid: int) -> Any:
    import psutil

    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _environ_of(process: Any) -> dict[str, str]:
    import psutil

    try:
        return dict(process.environ())
    except (psutil.Error, OSError):
        return {}


def _is_ours(process: Any) -> bool:
    """Python's own helpers live as long as the interpreter; a zombie was not waited for."""
    import psutil

    try:
        return "multiprocessing.resource_tracker" not in " ".join(process.cmdline())
    except psutil.ZombieProcess:
        return True
    except psutil.Error:
        return False


def _name_of(process: Any) -> str:
    import psutil

    try:
        return f"process {process.pid} ({' '.join(process.cmdline())[:120] or process.status()})"
    except psutil.Error:
        return f"process {process.pid} (zombie)"


def _only_deals_out(config: pytest.Config) -> bool:
    """Whether other processes collect the tests and run them: this one needs no torch."""
    is_dealt = config.getoption("dist", "no") != "no" and not config.getoption("collectonly")
    return is_dealt and not hasattr(config, "workerinput")


def _cuda_is_there() -> bool:
    import torch

    return torch.cuda.is_available()


def _poisoned(make: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def make_poisoned(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            x = make(*args, **kwargs)
            requires_grad = x.requires_grad
            x = x.detach()
            if x.dtype.is_floating_point or x.dtype.is_complex:
                x.fill_(float("nan"))
            elif x.dtype == torch.bool:
                x.fill_(True)
            else:
                x.fill_(torch.iinfo(x.dtype).max)
        return x.requires_grad_() if requires_grad else x

    return make_poisoned
