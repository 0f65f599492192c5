"""Where the files of --trace, --output and --html may be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.end_to_end.command import refused
from unisono.launcher.result_file import check_result_file
from unisono.models.config import ConfigError


def test_the_path_is_made_absolute_and_links_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.json").symlink_to(tmp_path / "there.json")
    assert check_result_file("--trace", "new.json") == tmp_path / "new.json"
    assert check_result_file("--trace", "link.json") == tmp_path / "there.json"
    assert [each.name for each in tmp_path.iterdir()] == ["link.json"], "nothing is left behind"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "is no file"),
        (".", "is no file"),
        ("/dev/null", "is no file"),
        ("nowhere/t.json", r"cannot be written \(No such file or directory\)"),
        ("file/t.json", r"cannot be written \(Not a directory\)"),
        ("x\0y", "cannot be written"),
        ("~nobody-of-that-name/t.json", "cannot be written"),
    ],
)
def test_what_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"--trace {name}: {why}.*; choose a file in a dir"):
        check_result_file("--trace", name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_or_file_without_the_right_is_refused(tmp_path: Path) -> None:
    closed, file = tmp_path / "closed", tmp_path / "file"
    closed.mkdir(mode=0o500)
    file.touch(mode=0o400)
    with pytest.raises(ConfigError, match="Permission denied"):
        check_result_file("--trace", str(closed / "t.json"))
    with pytest.raises(ConfigError, match="may not be written"):
        check_result_file("--trace", str(file))


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "tiny-mtp", "a", "--trace"),
        ("verify", "tiny-mtp", "--html"),
        ("bench", "ops", "--output"),
        ("bench", "offline", "tiny-mtp", "--output"),
    ],
    ids=" ".join,
)
def test_every_command_refuses_before_it_begins(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    err = refused(capsys, *command, str(tmp_path))
    assert f"{command[-1]} {tmp_path}: is no file; choose a file" in err
