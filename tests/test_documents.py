"""The documents are true: what they name exists, and the first commands are the promised ones."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "BENCHMARKS.md", "LOG.md")
BUILT = {"build", "dist", "__pycache__"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"(\./)?\.?[\w-]+(/[\w.*-]+)*(/|\.(py|md|toml|sbatch))|(\./)?[\w-]+(/[\w.-]+)+")
SYSTEM_PLACES = ("work", "root", "home", "Users")
MACHINE_PATH = re.compile(rf"(?<![\w.~}}$])/({'|'.join(SYSTEM_PLACES)})/\w|/tmp/" + r"w/")
REGISTRY = re.compile("pypi" + r"\.org|python" + r"hosted|debian" + r"\.org", re.IGNORECASE)


def test_the_readme_begins_with_the_two_commands():
    blocks = FENCE.findall((ROOT / "README.md").read_text())
    assert blocks[0][1].splitlines() == ["$ ./scripts/demo", "$ ./scripts/test"]
    before = (ROOT / "README.md").read_text().partition("```")[0]
    assert before.startswith("# unisono\n")
    assert before.count(".") == 1, "one sentence stands before the commands"


def test_the_readmes_table_of_verify_fits_100_columns():
    text = (ROOT / "README.md").read_text()
    _, _, table = text.partition("$ unisono verify demo")[2].partition("```")[0].partition("\n")
    assert "equal" in table
    assert max(map(len, table.splitlines())) <= 100


@pytest.mark.parametrize("document", DOCUMENTS)
def test_quoted_names_exist(document):
    assert [name for name in _quoted(document) if not _exists(name)] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_quoted_commands_and_options_exist(document):
    text = (ROOT / document).read_text()
    assert [fault for line in _commands(text) for fault in _command_faults(line)] == []


def test_python_examples_import_what_exists():
    blocks = [code for kind, code in FENCE.findall((ROOT / "README.md").read_text())]
    examples = [code for code in blocks if "import" in code]
    assert examples
    for node in (node for code in examples for node in ast.walk(ast.parse(code))):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def test_environment_variables_are_documented():
    """In the README stand exactly the variables of ours that the code reads."""
    pattern = re.compile(r"\bUNISONO_[A-Z_]+\b")
    files = [path for path in _text_files() if path.relative_to(ROOT).parts[0] not in ("tests",)]
    code = [path for path in files if path.suffix != ".md"]
    read = {name for path in code for name in pattern.findall(path.read_text())}
    assert set(pattern.findall((ROOT / "README.md").read_text())) == read


@pytest.mark.parametrize("pattern", [MACHINE_PATH, REGISTRY], ids=["machine path", "registry"])
def test_no_file_names_one_machine(pattern):
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in _text_files()
        for match in pattern.finditer(path.read_text())
    ]
    assert found == []


def test_no_file_holds_the_two_sides_of_a_merge():
    marks = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)
    found = [path for path in _text_files() if marks.search(path.read_text(errors="replace"))]
    assert found == []


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("launcher/", True),
        ("./scripts/test", True),
        ("models/partition.py", True),
        ("pyproject.toml", True),
        ("unisono.runtime.protocol", True),
        ("unisono.models.config.ConfigError", True),
        ("unisono.models.config.Gone", False),
        ("ConfigError", True),
        ("scripts/gone", False),
        ("models/gone.py", False),
        ("gone.md", False),
        ("unisono.models.gone", False),
        ("NeverDefined" + "Anywhere", False),
    ],
)
def test_missing_names_are_found(name, there):
    assert _exists(name) is there


@pytest.mark.parametrize(
    ("line", "num_faults"),
    [
        ("unisono generate demo --tp 2", 0),
        ("torchrun --nproc-per-node 2 -m unisono generate demo", 0),
        ("unisono gone demo", 1),
        ("unisono generate demo --gone", 1),
        ("./scripts/gone", 1),
    ],
)
def test_wrong_commands_are_found(line, num_faults):
    assert len(list(_command_faults(line))) == num_faults


def _quoted(document: str) -> Iterator[str]:
    """Names between backticks; what holds a blank is a command or a sentence of code."""
    text = FENCE.sub("", (ROOT / document).read_text())
    return (name for name in QUOTED.findall(text) if " " not in name)


def _commands(text: str) -> Iterator[str]:
    """Lines of console blocks and quoted commands."""
    for kind, block in FENCE.findall(text):
        if kind == "console":
            yield from (line[2:] for line in block.splitlines() if line.startswith("$ "))
    for name in QUOTED.findall(FENCE.sub("", text)):
        if re.match(r"(unisono|torchrun|sbatch|(\./)?scripts/\w+) ", name) or name.startswith("--"):
            yield name


def _exists(name: str) -> bool:
    if "/" not in name and any(name == path.name for path in _text_files()):
        return True
    if PATH.fullmatch(name):
        return any(ROOT.glob(name.removeprefix("./").rstrip("/")))
    if name.startswith("unisono."):
        module, _, member = name.rpartition(".")
        return _module_path(name) is not None or _defines(module, member)
    if name.startswith("--"):
        return name in _options()
    word = re.match(r"[@~./\w]+", name)
    return word is not None and word[0].rpartition(".")[2] in _words()


def _module_path(name: str) -> Path | None:
    path = ROOT.joinpath(*name.split(".")[1:])
    found = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    return found[0] if found else None


def _defines(module: str, member: str) -> bool:
    path = _module_path(module)
    return path is not None and re.search(rf"\b{member}\b", path.read_text()) is not None


def _command_faults(line: str) -> Iterator[str]:
    words = shlex.split(line)
    for word in words:
        is_path = PATH.fullmatch(word) and word.startswith(("./", "scripts/", "tests/"))
        if is_path and not _exists(word):
            yield f"{line}: no {word}"
    if words[0].startswith("--"):
        words = ["unisono", *words]
    if "unisono" not in words:
        return
    arguments = words[words.index("unisono") + 1 :]
    if arguments and not arguments[0].startswith("-") and arguments[0] not in _command_names():
        yield f"{line}: no command {arguments[0]}"
    yield from (
        f"{line}: no option {word}"
        for word in arguments
        if word.startswith("--") and word not in _options()
    )


@cache
def _command_names() -> tuple[str, ...]:
    return tuple(importlib.import_module("unisono.launcher.cli").COMMANDS)


@cache
def _options() -> frozenset[str]:
    """Every option of the command line, and those of `scripts/test`."""
    cli = importlib.import_module("unisono.launcher.cli")
    commands = [importlib.import_module(module).command for module, _ in cli.COMMANDS.values()]
    options = {"--help", "--gpu"}
    groups = [command for command in commands if isinstance(command, click.Group)]
    inner = [command for group in groups for command in group.commands.values()]
    for command in [cli.unisono_command, *commands, *inner]:
        assert isinstance(command, click.Command)
        options.update(option for parameter in command.params for option in parameter.opts)
    return frozenset(options)


@cache
def _words() -> frozenset[str]:
    """Every word of the code and the scripts."""
    code = [path for path in _text_files() if path.suffix != ".md"]
    return frozenset(word for path in code for word in re.findall(r"\w+", path.read_text()))


@cache
def _text_files() -> tuple[Path, ...]:
    """Files of the project, as a clone would have them."""
    files = []
    for path in sorted(ROOT.rglob("*")):
        folders = path.relative_to(ROOT).parts[:-1]
        hidden = any(folder.startswith(".") and folder != ".ci" for folder in folders)
        if not hidden and not BUILT & set(folders) and path.is_file() and _is_text(path):
            files.append(path)
    return tuple(files)


def _is_text(path: Path) -> bool:
    try:
        path.read_text()
    except UnicodeDecodeError:
        return False
    return ".egg-info" not in str(path) and path.suffix != ".log"
