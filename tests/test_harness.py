"""The tests' own tools must be able to fail: tolerances, alarm, leftovers, poisoned memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.closeness import assert_close, assert_same_bits

ROOT = Path(__file__).resolve().parent.parent
NAN, INF = float("nan"), float("inf")


def test_close_is_a_ratio_of_rms():
    want = torch.tensor([3.0, -4.0, 0.0])
    assert_close("x", want * (1 + 1e-6), want, rms_ratio=1.1e-6)
    with pytest.raises(AssertionError, match=r"x: relative rms 1\.0\d+e-03, allowed 1\.000e-04"):
        assert_close("x", want * (1 + 1e-3), want, rms_ratio=1e-4)


def test_close_names_the_worst_element():
    want = torch.ones(2, 3)
    got = want.clone()
    got[1, 2] = 5.0
    with pytest.raises(AssertionError, match=r"worst element \[1, 2\]: got 5\.0, expected 1\.0"):
        assert_close("x", got, want, rms_ratio=1e-3)


def test_close_accepts_a_wider_reference_and_refuses_another_shape():
    want = torch.rand(4, dtype=torch.float64)
    assert_close("x", want.bfloat16(), want, rms_ratio=4e-3)
    with pytest.raises(AssertionError, match=r"shape \[1, 4\], expected \[4\]"):
        assert_close("x", want[None], want, rms_ratio=1.0)


@pytest.mark.parametrize("got", [NAN, INF, -INF, 1.0], ids=str)
@pytest.mark.parametrize("want", [NAN, INF, -INF, 1.0], ids=str)
def test_close_compares_specials_by_kind(got, want):
    pair = torch.tensor([2.0, got]), torch.tensor([2.0, want])
    if str(got) == str(want):
        assert_close("x", *pair, rms_ratio=0.0)
    else:
        with pytest.raises(AssertionError, match="1 of 2 elements differ in being finite"):
            assert_close("x", *pair, rms_ratio=1e9)


def test_zeros_are_close_to_zeros_only():
    zeros = torch.zeros(3)
    assert_close("x", -zeros, zeros, rms_ratio=0.0)
    assert_close("x", torch.zeros(0), torch.zeros(0), rms_ratio=0.0)
    with pytest.raises(AssertionError, match="relative rms inf"):
        assert_close("x", zeros + 1e-30, zeros, rms_ratio=1.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_same_bits_sees_one_ulp_and_the_sign_of_zero(dtype):
    want = torch.tensor([0.0, 1.0, NAN], dtype=dtype)
    assert_same_bits("x", want.clone(), want)
    with pytest.raises(AssertionError, match=r"1 of 3 .* first \[0\]: got -0\.0, expected 0\.0"):
        assert_same_bits("x", torch.tensor([-0.0, 1.0, NAN], dtype=dtype), want)
    near = torch.nextafter(want, torch.full_like(want, 2.0)) if dtype.itemsize > 2 else want + 0.01
    near[0] = 0.0
    with pytest.raises(AssertionError, match=r"1 of 3 .* first \[1\]"):
        assert_same_bits("x", near, want)


def test_same_bits_refuses_another_dtype_or_shape_and_reads_strided():
    want = torch.arange(6).reshape(2, 3)
    assert_same_bits("x", want.T, want.T.contiguous())
    assert_same_bits("x", want.bool(), want.bool())
    with pytest.raises(AssertionError, match=r"dtype torch\.int32, expected torch\.int64"):
        assert_same_bits("x", want.int(), want)
    with pytest.raises(AssertionError, match="shape"):
        assert_same_bits("x", want.T, want)


def test_empty_memory_is_poisoned(nan_filled_empty):
    like = torch.ones(2, dtype=torch.bfloat16)
    for x in (
        torch.empty(2, 3),
        torch.empty_like(like),
        like.new_empty((4,)),
        torch.empty_strided((2, 2), (2, 1)),
        torch.empty(2, requires_grad=True),
        torch.empty(2, dtype=torch.float8_e4m3fn).float(),
    ):
        assert bool(torch.isnan(x).all())
    assert torch.empty(2, dtype=torch.int32).tolist() == [2**31 - 1] * 2
    assert torch.empty(2, dtype=torch.bool).tolist() == [True, True]


def test_poison_ends_with_its_test():
    assert torch.empty.__name__ == "empty"
    assert "new_empty" not in vars(torch.Tensor)


FAULTS = """
import random, subprocess, sys, tempfile, time
import pytest, torch

STARTED = []
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]

@pytest.mark.timeout(0.3)
def test_too_slow():
    try:
        time.sleep(60)
    except Exception:
        pass

def test_child_left():
    STARTED.append(subprocess.Popen(SLEEP))

def test_orphan_left():
    code = f"import subprocess; subprocess.Popen({SLEEP!r}, start_new_session=True)"
    subprocess.run([sys.executable, "-c", code], check=True)

def test_directory_left():
    tempfile.mkdtemp(prefix="unisono-")

@pytest.mark.gpu
def test_on_a_gpu():
    assert False

@pytest.mark.soak
def test_for_an_hour():
    assert False

def test_clean():
    subprocess.run([sys.executable, "-c", ""], check=True)

@pytest.mark.parametrize("turn", [0, 1])
def test_draws_are_seeded(turn):
    assert (random.random(), torch.rand(1).item()) == (0.8444218515250481, 0.49625658988952637)
"""


def test_faults_of_tests_are_found(tmp_path):
    """A hanging test, children, orphans and private directories each fail the test they are of."""
    done = _run_pytest(tmp_path, FAULTS)
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert "ran past its limit of 0.3 s" in output
    for name in ("test_child_left", "test_orphan_left", "test_directory_left"):
        assert f"ERROR inner/test_inner.py::{name} - Failed: left behind: " in output, output
    assert "1 failed, 6 passed, 2 deselected, 3 errors" in output
    assert "left behind by the test session: " in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_gpu_tests_are_skipped_without_a_gpu(tmp_path):
    done = _run_pytest(tmp_path, FAULTS, "-m", "gpu")
    assert "SKIPPED [1] inner/test_inner.py:" in done.stdout
    assert "1 skipped, 8 deselected" in done.stdout


def _run_pytest(tmp_path: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `source` as a test file under this project's conftest and options."""
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    conftest = (ROOT / "tests" / "conftest.py").read_text()
    (inner / "conftest.py").write_text(
        conftest.replace("LEAVE_GRACE_S = 5.0", "LEAVE_GRACE_S = 0.2")
    )
    (inner / "test_inner.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, "inner"]
    environ = os.environ | {"PYTHONPATH": "", "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100
    )
