# SPDX-License-Identifier: Apache-2.0
"""Imports point down, and what a person types first starts at once."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOLT = ROOT / "molt"

# Which parts of molt a part may import, itself aside. Imports inside functions count too.
BASE = {"config", "records", "metrics", "data", "control", "store", "transfer", "agents"}
MAY_IMPORT = {
    "records": set[str](),
    "metrics": set[str](),
    "algo": set[str](),
    "config": {"records"},  # for ConfigError alone
    "data": {"config", "records"},
    "store": {"records"},
    "transfer": {"records"},
    "agents": {"records"},
    "control": {"records", "config"},
    "rollout": BASE,
    "coordinator": BASE,
    "trainer": BASE | {"algo"},
    "launch": {"config", "records", "data"},
    "inspect": {"records", "store", "metrics"},
    "train": BASE | {"launch", "inspect"},  # `molt train`, the one command with a file of its own
    "__init__": {"agents", "launch"},
}
HEAVY = {"torch", "vllm", "transformers", "nemo_automodel", "pandas"}


def part_of(path: Path) -> str:
    return path.relative_to(MOLT).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """(dotted name, line) for each import in a file."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def test_imports_point_down() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted(MOLT.rglob("*.py"))
        if (own := part_of(path)) != "cli"  # may import anything, where it is used
        for name, line in imports_of(path)
        if name.startswith("molt.") and name.split(".")[1] not in MAY_IMPORT[own] | {own}
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_adapter_names_automodel() -> None:
    naming = {
        path.relative_to(MOLT).as_posix()
        for path in MOLT.rglob("*.py")
        for name, _ in imports_of(path)
        if name.startswith("nemo_automodel")
    }
    assert naming == {"trainer/policy.py"}


def run_molt(arguments: list[str], after: str) -> str:
    """Run the command in a fresh process, then `after`; returns what that printed last."""
    program = f"import sys\nfrom molt.cli import main\ntry: main({arguments})\n"
    program += f"except SystemExit: pass\nimport resource\nprint()\n{after}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "--help"], ["train", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    loaded = run_molt(arguments, "print(*{name.partition('.')[0] for name in sys.modules})")
    assert "molt" in loaded.split()
    assert not HEAVY & set(loaded.split())


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "--help"]])
def test_help_takes_less_than_four_tenths_of_a_second(arguments: list[str]) -> None:
    # Seconds of CPU: starting waits for nothing, and busy neighbours do not change them.
    used = "u = resource.getrusage(resource.RUSAGE_SELF)\nprint(u.ru_utime + u.ru_stime)"
    assert min(float(run_molt(arguments, used)) for _ in range(3)) <= 0.4
