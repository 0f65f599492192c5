"""The package works installed plainly, as an editable, and not at all; from inside and outside.

A copy of the checkout is installed into environments of its own, which borrow the libraries of
this one but not its `unisono`.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import unisono

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("launcher", "runtime", "workers", "models", "ops")
LIBRARIES = sysconfig.get_path("purelib")
WAYS = ("plain", "editable", "uninstalled")
TINY = (
    "from unisono.launcher.model_source import resolve_model, read_source_config;"
    "config = read_source_config(resolve_model('tiny-mtp'), 'auto');"
    "print(config.family, config.num_mtp_layers)"
)
IMPORTS = (
    "import unisono, unisono.ops.reference, unisono.models.layers, unisono.workers.protocol;"
    "import unisono.launcher.cli;"
)
SPAWN = """
import multiprocessing
from unisono.workers.protocol import Phase

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=Phase, args=(2,))
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
"""


@dataclass(frozen=True)
class Installed:
    """One way to have unisono: an interpreter, what it needs to know, and the checkout."""

    python: str
    environ: Mapping[str, str]
    checkout: Path
    package: Path
    """Where `import unisono` must find it."""

    def run(
        self, command: list[str], cwd: Path, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=cwd,
            env={**self.environ, **environ},
            capture_output=True,
            text=True,
            timeout=100,
        )


@pytest.fixture(scope="module")
def installs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Installed]:
    # Its version only: to import it after another test has imported distutils is an error.
    if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("builds need setuptools 77 here")
    place = tmp_path_factory.mktemp("install")
    checkout = _copy_checkout(place / "checkout")
    plain, editable = _environment(place / "plain"), _environment(place / "editable")
    _install(plain, str(checkout))
    shutil.rmtree(checkout / "build", ignore_errors=True)
    _install(editable, "--editable", str(checkout))
    site = Path(sysconfig.get_path("purelib", vars={"base": str(place / "plain")}))
    clean = _clean_environ()
    # -S and this path: the libraries without the start-up files of an editable install.
    uninstalled = {**clean, "PYTHONPATH": os.pathsep.join([str(checkout), LIBRARIES])}
    return {
        "plain": Installed(plain, clean, checkout, site / "unisono"),
        "editable": Installed(editable, clean, checkout, checkout / "unisono"),
        "uninstalled": Installed(sys.executable, uninstalled, checkout, checkout / "unisono"),
    }


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("way", WAYS)
def test_import_and_command(installs, tmp_path, way, inside):
    """From inside the checkout its own files are found, however unisono is installed."""
    installed = installs[way]
    cwd = installed.checkout if inside else tmp_path
    package = installed.checkout / "unisono" if inside else installed.package
    code = f"{IMPORTS} print(unisono.__file__); unisono.launcher.cli.main(['--version'])"
    flags = ["-S"] if way == "uninstalled" else []
    done = installed.run([installed.python, *flags, "-c", code], cwd)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{package / '__init__.py'}\nunisono {unisono.__version__}\n"


@pytest.mark.parametrize("way", WAYS)
def test_module_and_spawned_child(installs, tmp_path, way):
    installed = installs[way]
    flags = ["-S"] if way == "uninstalled" else []
    done = installed.run([installed.python, *flags, "-m", "unisono", "--version"], tmp_path)
    assert done.stdout == f"unisono {unisono.__version__}\n", done.stderr
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    done = installed.run([installed.python, *flags, str(script)], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("way", WAYS)
def test_the_tiny_model_comes_with_it(installs, tmp_path, way):
    installed = installs[way]
    flags = ["-S"] if way == "uninstalled" else []
    done = installed.run([installed.python, *flags, "-c", TINY], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "qwen3_5 1\n", "")


@pytest.mark.parametrize("way", ["plain", "editable"])
def test_console_script(installs, tmp_path, way):
    installed = installs[way]
    done = installed.run([str(Path(installed.python).parent / "unisono"), "--version"], tmp_path)
    assert done.stdout == f"unisono {unisono.__version__}\n", done.stderr


def test_torchrun_finds_the_package(installs, tmp_path):
    """torchrun starts ranks with `python -m`, here from outside the checkout."""
    installed = installs["editable"]
    command = [installed.python, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "unisono", "--version"]
    done = installed.run(command, tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"unisono {unisono.__version__}\n") == 2


def test_plain_install_holds_the_rooms_and_nothing_else(installs):
    """Every module of the rooms, the type marker and tiny-mtp; no tests, no scripts."""
    package, checkout = installs["plain"].package, installs["plain"].checkout
    files = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    modules = [path for room in ROOMS for path in _sources(checkout / room)]
    wanted = {str(path.relative_to(checkout)) for path in modules}
    wanted |= {"__init__.py", "__main__.py", "py.typed"}
    tiny = checkout / "models" / "tiny_mtp"
    wanted |= {str(path.relative_to(checkout)) for path in tiny.iterdir()}
    assert {name for name in files if "__pycache__" not in name} == wanted
    beside = {path.name for path in package.parent.iterdir()}
    assert not beside & {"tests", "scripts", *ROOMS}


def test_metadata(installs):
    installed = installs["plain"]
    folder = next(installed.package.parent.glob("unisono-*.dist-info"))
    metadata = (folder / "METADATA").read_text()
    assert f"\nVersion: {unisono.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "Apache License" in (folder / "licenses" / "LICENSE").read_text()


def test_every_package_folder_is_listed():
    """A folder with an `__init__.py` that pyproject.toml forgets is missing once installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {"unisono"} | {
        ".".join(("unisono", *path.parent.relative_to(ROOT).parts))
        for room in ROOMS
        for path in (ROOT / room).rglob("__init__.py")
    }
    assert sorted(project["packages"]) == sorted(found)
    assert project["package-dir"] == {
        "unisono": "unisono",
        **{f"unisono.{room}": room for room in ROOMS},
    }
    folders = {path.parent for room in ROOMS for path in _sources(ROOT / room)}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_version_is_read_without_importing():
    """A build environment has no torch, and need not have the rooms' libraries either."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "unisono.__version__"}
    assert (
        f'\n__version__ = "{unisono.__version__}"\n' in (ROOT / "unisono/__init__.py").read_text()
    )


def _copy_checkout(target: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*ROOMS, "unisono"):
        shutil.copytree(ROOT / name, target / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target / name)
    return target


def _environment(place: Path) -> str:
    """Make a virtual environment that sees this one's libraries; return its interpreter."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(place)], check=True, timeout=100
    )
    site = Path(sysconfig.get_path("purelib", vars={"base": str(place)}))
    # A line of a .pth file adds the folder, but does not run the .pth files in it.
    (site / "libraries.pth").write_text(f"{LIBRARIES}\n")
    return str(place / "bin" / "python")


def _install(python: str, *what: str) -> None:
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--ignore-installed", *what]
    done = subprocess.run(
        command, env=_clean_environ(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _clean_environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _sources(folder: Path) -> list[Path]:
    return list(folder.rglob("*.py"))
