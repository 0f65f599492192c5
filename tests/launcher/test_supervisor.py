"""Children start, are seen to end, and are ended, whatever they and their parent do."""

from __future__ import annotations

import os
import signal
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tests.launcher.fake_child import Todo
from tests.paths import ROOT, python_path
from unisono.launcher import private_directory
from unisono.launcher.private_directory import MAX_SOCKET_PATH, PrivateDirectory, sweep
from unisono.launcher.process_table import ProcessSpec
from unisono.launcher.supervisor import Exit, Supervisor
from unisono.models.config import ConfigError

DEAD_PID = 4_194_305
"""Above the largest process id of Linux."""


def spec(name: str, what: str, path: Path | str = "", **rest: object) -> ProcessSpec:
    env = {"PYTHONPATH": python_path()} | rest.pop("env", {})
    entry = "tests.launcher.fake_child:child"
    return ProcessSpec(name=name, entry=entry, orders=Todo(what, str(path)), env=env, **rest)


def test_ends_are_reported_with_code_or_signal():
    specs = [spec("a", "exit 0"), spec("b", "exit 7"), spec("c", "signal 6"), spec("d", "sleep")]
    with Supervisor(specs, grace_s=1) as supervisor:
        supervisor.start()
        pids = supervisor.pids()
        assert list(pids) == ["a", "b", "c", "d"]
        ends = {end.name: end for end in _wait_for_ends(supervisor, 3)}
        assert ends == {
            "a": Exit(name="a", pid=pids["a"], code=0, signal=0),
            "b": Exit(name="b", pid=pids["b"], code=7, signal=0),
            "c": Exit(name="c", pid=pids["c"], code=0, signal=6),
        }
        assert not supervisor.wait(0.1)
    assert len(supervisor.poll()) == 4
    assert supervisor.wait(0)
    assert not any(map(_is_alive, pids.values()))


def test_constructing_starts_nothing_and_stopping_first_is_final():
    supervisor = Supervisor([spec("a", "sleep")], grace_s=1)
    supervisor.stop()
    supervisor.start()
    assert supervisor.pids() == {}


def test_an_exception_in_the_entry_is_exit_code_1(capfd):
    with Supervisor([spec("a", "nonsense")], grace_s=1) as supervisor:
        supervisor.start()
        [end] = _wait_for_ends(supervisor, 1)
    assert (end.code, end.signal) == (1, 0)
    assert "AssertionError: ['nonsense']" in capfd.readouterr().err


def test_children_find_our_package_from_anywhere(tmp_path, monkeypatch):
    """Not the one of the directory they start in, and without an installation."""
    (tmp_path / "unisono").mkdir()
    (tmp_path / "unisono" / "__init__.py").write_text("raise SystemError('the wrong one')")
    (tmp_path / "own").mkdir()
    entry = tmp_path / "own" / "entry_of_this_test.py"
    entry.write_text(
        "import os, pathlib, unisono\n"
        "from unisono.workers import protocol\n"
        "def look(): pathlib.Path('seen').write_text(unisono.__file__ + ' ' + os.environ['COLOUR'])"
    )
    monkeypatch.chdir(tmp_path)
    env = {"PYTHONPATH": str(entry.parent), "COLOUR": "red"}
    look = ProcessSpec(name="a", entry=f"{entry.stem}:look", orders=Todo("look"), env=env)
    with Supervisor([look], grace_s=1) as supervisor:
        supervisor.start()
        [end] = _wait_for_ends(supervisor, 1)
    assert end.code == 0
    assert (tmp_path / "seen").read_text() == f"{ROOT}/unisono/__init__.py red"


def test_file_descriptors_are_handed_down(tmp_path):
    reader, writer = os.pipe()
    path = tmp_path / "got"
    os.write(writer, b"hello")
    with Supervisor([spec("a", f"read {reader}", path, pass_fds=(reader,))], 1) as supervisor:
        supervisor.start()
        os.close(reader)
        os.close(writer)
        _wait_for_ends(supervisor, 1)
    assert path.read_text() == "hello"


def test_a_deaf_child_is_killed_after_the_grace(tmp_path):
    with Supervisor([spec("a", "deaf", tmp_path / "pid")], grace_s=0.5) as supervisor:
        supervisor.start()
        _read(tmp_path / "pid")
        begin = time.monotonic()
        supervisor.stop()
        assert 0.5 <= time.monotonic() - begin < 2.0
        assert [end.signal for end in supervisor.poll()] == [signal.SIGKILL]
        supervisor.stop()


def test_a_stopped_child_is_killed_after_the_grace(tmp_path):
    with Supervisor([spec("a", "sleep", tmp_path / "pid")], grace_s=0.3) as supervisor:
        supervisor.start()
        _freeze(int(_read(tmp_path / "pid")))
        supervisor.stop()
        assert [end.signal for end in supervisor.poll()] == [signal.SIGKILL]


def test_an_interrupt_while_stopping_ends_the_grace(tmp_path):
    with Supervisor([spec("a", "sleep", tmp_path / "pid")], grace_s=30) as supervisor:
        supervisor.start()
        _freeze(int(_read(tmp_path / "pid")))
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            supervisor.stop()
        timer.join()
        assert [end.signal for end in supervisor.poll()] == [signal.SIGKILL]


def test_stop_inside_a_signal_handler(tmp_path):
    """Whatever it interrupts, here the start and the polls, it comes through."""
    specs = [spec(f"{number}", "sleep") for number in range(3)]
    for delay_s in (0.0005, 0.004, 0.02, 0.05):
        supervisor = Supervisor(specs, grace_s=1)
        previous = signal.signal(signal.SIGUSR1, lambda *_, s=supervisor: s.stop())
        timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        supervisor.start()
        while timer.is_alive():
            supervisor.poll()
        timer.join()
        supervisor.stop()
        signal.signal(signal.SIGUSR1, previous)
        assert len(supervisor.poll()) == len(supervisor.pids())
        assert not any(map(_is_alive, supervisor.pids().values()))


def test_what_a_child_started_ends_with_it(tmp_path):
    with Supervisor([spec("a", "grandchild", tmp_path / "pid")], grace_s=1) as supervisor:
        supervisor.start()
        [end] = _wait_for_ends(supervisor, 1)
        assert end.code == 3
        pid = int(_read(tmp_path / "pid"))
        assert _until(lambda: not _is_alive(pid), 3)


def test_children_outlive_the_thread_that_started_the_supervisor(tmp_path):
    """The kernel sends the parent-death signal when the spawning thread ends."""
    with Supervisor([spec("a", "sleep", tmp_path / "pid")], grace_s=1) as supervisor:
        thread = threading.Thread(target=supervisor.start)
        thread.start()
        thread.join()
        _read(tmp_path / "pid")
        time.sleep(0.3)
        assert supervisor.poll() == []


def test_a_spawn_that_fails_is_raised_and_stops_the_rest(tmp_path):
    specs = [spec("a", "sleep", tmp_path / "pid"), spec("b", "sleep", env={"BAD": "nul\0"})]
    with Supervisor(specs, grace_s=1) as supervisor:
        with pytest.raises(ValueError, match="null byte"):
            supervisor.start()
        supervisor.stop()
        assert [end.name for end in supervisor.poll()] == ["a"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_of_the_launcher_stops_nothing(tmp_path):
    with Supervisor([spec("a", "sleep", tmp_path / "pid")], grace_s=1) as supervisor:
        supervisor.start()
        _read(tmp_path / "pid")
        fork = os.fork()
        if fork == 0:
            supervisor.stop()
            os._exit(0)
        os.waitpid(fork, 0)
        time.sleep(0.1)
        assert supervisor.poll() == []


def test_the_private_directory_is_private_short_and_gone_after():
    directory = PrivateDirectory()
    assert not directory.path.exists()
    directory.close()
    with directory:
        assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
        assert directory.path.name.startswith(f"unisono-{os.getpid()}-")
        endpoint = directory.endpoint("worker")
        assert endpoint == f"ipc://{directory.path}/worker"
        assert len(endpoint) <= len("ipc://") + MAX_SOCKET_PATH
        (directory.path / "worker").touch()
    assert not directory.path.exists()
    directory.close()


def test_a_long_temporary_directory_is_not_used(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert PrivateDirectory().path.parent == Path("/tmp")


def test_a_directory_that_cannot_be_made_is_a_config_error(tmp_path, monkeypatch):
    monkeypatch.setattr(private_directory, "_root", lambda: tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"cannot make .*/nowhere/.*set TMPDIR"):
        PrivateDirectory().create()


def test_only_directories_of_dead_launchers_are_swept(tmp_path):
    names = {
        f"unisono-{DEAD_PID}-abc": False,
        f"unisono-{os.getpid()}-abc": True,
        f"unisono-{os.getppid()}-abc": True,
        "unisono-1-abc": True,
        f"unisono-{'9' * 30}-abc": True,
        "unisono-x-abc": True,
        f"unisono-{DEAD_PID}-not hexadecimal": True,
        f"other-{DEAD_PID}-abc": True,
    }
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "worker").touch()
    (tmp_path / "kept").mkdir()
    link = tmp_path / f"unisono-{DEAD_PID}-def"
    link.symlink_to(tmp_path / "kept")
    sweep(tmp_path)
    assert {name: (tmp_path / name).exists() for name in names} == names
    assert link.is_symlink()


def _wait_for_ends(supervisor: Supervisor, count: int) -> list[Exit]:
    assert _until(lambda: len(supervisor.poll()) == count, 10)
    return supervisor.poll()


def _freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    assert _until(lambda: "\nState:\tT" in Path(f"/proc/{pid}/status").read_text(), 5)


def _read(path: Path) -> str:
    assert _until(path.exists, 10)
    return path.read_text()


def _until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
