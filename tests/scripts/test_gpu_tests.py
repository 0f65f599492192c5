"""scripts/gpu_tests.py: every test that needs a GPU is run once, and where it can."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests import conftest
from tests.paths import ROOT, loaded_script

SCRIPT = ROOT / "scripts" / "gpu_tests.py"


@pytest.fixture(scope="module")
def script():
    with loaded_script("gpu_tests") as module:
        yield module


@pytest.mark.parametrize("num_gpus", [2, 3])
def test_every_test_is_in_one_share(script, num_gpus: int) -> None:
    found: Counter[tuple[bool, bool, int, int]] = Counter()
    for shares in script.phases(num_gpus, 2).values():
        for share, alone, two_gpus in itertools.product(shares, (False, True), (False, True)):
            marked = {"gpu": True, "alone": alone, "two_gpus": two_gpus}
            assert not eval(share.marks, {}, marked | {"gpu": False})
            if eval(share.marks, {}, marked):
                found[alone, two_gpus, share.part, share.parts] += 1
    assert set(found.values()) == {1}
    for alone, two_gpus in itertools.product((False, True), (False, True)):
        of_kind = [key[2:] for key in found if key[:2] == (alone, two_gpus)]
        assert sorted(of_kind) == [(part, len(of_kind)) for part in range(len(of_kind))]


@pytest.mark.parametrize("parts", [1, 3, 12])
def test_shards_are_disjoint_and_leave_nothing_out(parts: int) -> None:
    names = [f"test_{number}" for number in range(10)]
    found: list[str] = []
    for part in range(parts):
        config, items = Mock(), [FakeItem(name) for name in names]
        config.getoption.return_value = f"{part}/{parts}"
        conftest.pytest_collection_modifyitems(config, items)
        dropped = config.hook.pytest_deselected.call_args.kwargs["items"]
        assert sorted(item.name for item in items + dropped) == names
        found += [item.name for item in items]
    assert sorted(found) == names


class FakeItem:
    """A test without marks."""

    path = Path("tests/some/test_it.py")

    def __init__(self, name: str) -> None:
        self.name = name

    def get_closest_marker(self, name: str) -> None:
        return None


def test_gpus_are_shared_and_those_of_two_seen_together(script) -> None:
    assert tuple(script.phases(2, 3)) == script.PHASES
    crowd, alone, together, last = script.phases(2, 3).values()
    assert [share.gpus for share in crowd] == [[0], [1]] * 3
    assert [share.gpus for share in alone] == [[0], [1]]
    assert [share.gpus for share in together + last] == [[0, 1]] * 3
    assert [len(shares) for shares in script.phases(1, 4).values()] == [4, 1]


def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "no CUDA device is visible to torch\n"
