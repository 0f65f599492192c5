"""Where flights lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.launcher.flights import flight_file
from unisono.models.config import ConfigError

SESSION = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({"UNISONO_CACHE": "/c", "XDG_STATE_HOME": "/s"}, "/c/flights"),
        ({"UNISONO_CACHE": "", "XDG_STATE_HOME": "/s"}, "/s/unisono/flights"),
        ({}, f"{Path.home()}/.local/state/unisono/flights"),
    ],
)
def test_the_users_own_place(environ: dict[str, str], place: str) -> None:
    file = flight_file("", environ, SESSION)
    assert str(file.parent) == place
    assert file.name.endswith("-01234567.flight")


def test_a_chosen_directory_is_made_at_once_and_private(tmp_path: Path) -> None:
    chosen = tmp_path / "a" / "b"
    file = flight_file(str(chosen), {"UNISONO_CACHE": "/c"}, SESSION)
    assert file.parent == chosen
    assert chosen.stat().st_mode & 0o777 == 0o700
    assert list(chosen.iterdir()) == []


def test_one_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--flight-dir .*file: cannot be made \(File exists\)"):
        flight_file(str(tmp_path / "file"), {}, SESSION)
