"""Figures of the house (`python -m tests.house_figures [--list]`): sizes, loose files, docstrings that do not stand
alone, long names of tests."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("src/manta/api", "src/manta/service", "src/manta/workers")
LEANS_ON_WHAT_IS_ABOVE = re.compile(r"(The same|It|Its|They|Their|Them|These|Those|That|He|She|His|Her|Same|Such)\b")
MAX_NAME = 90


def sources(*folders: str) -> list[Path]:
    """Python files below these folders of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def lines(paths: list[Path]) -> list[int]:
    """Number of lines of each."""
    return [len(path.read_text().splitlines()) for path in paths]


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        can_have_one = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for before, each in zip([None, *body], body, strict=False):
            follows = can_have_one if before is None else isinstance(before, ast.Assign | ast.AnnAssign)
            match each:
                case ast.Expr(ast.Constant(str(text))) if follows:
                    yield each.lineno, text


def tests() -> Iterator[tuple[Path, str]]:
    """Every test function."""
    for path in sources("tests"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield path, node.name


def main() -> None:
    """Print them; with `--list` also what is to be mended."""
    production, sizes = sources(*PACKAGES), lines(sources(*PACKAGES))
    loose = [path for each in PACKAGES for path in (ROOT / each).glob("*.py") if path.name != "__init__.py"]
    leaning = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in (*production, *sources("benchmarks"))
        for line, text in docstrings(path)
        if LEANS_ON_WHAT_IS_ABOVE.match(text)
    ]
    names = list(tests())
    long = [f"{path.relative_to(ROOT)}: {name}" for path, name in names if len(name) > MAX_NAME]
    tested = sum(lines(sources("tests")))
    print(f"production: {len(production)} files, {sum(sizes)} lines, the longest has {max(sizes)}")
    print(f"loose files in {', '.join(PACKAGES)}: {len(loose)}")
    print(f"benchmarks: {sum(lines(sources('benchmarks')))} lines")
    print(f"tests: {len(names)}, {tested} lines, {tested / sum(sizes):.2f} a line of production")
    print(f"docstrings that begin with a pronoun or 'The same': {len(leaning)}")
    print(f"names of tests over {MAX_NAME} characters: {len(long)}")
    if "--list" in sys.argv:
        print("\n".join((*leaning, *long)))


if __name__ == "__main__":
    main()
