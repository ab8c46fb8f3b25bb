"""How the notebooks read: bodies on the line of their colon, long cells, prose that says nothing.

usage: python tools/style.py [--figures] [notebook …]      without names: all of nbs/

ruff looks at width, semicolons, unused imports and complexity. What it cannot say, this does:
- a body on the line of its colon is for short exits (return, raise, continue, break, pass) and for
  functions of one line;
- a function that is exported has at most 25 lines of body (signature, docstring and
  `self.x = x` not counted);
- a prose cell has more than eight words, or is a heading.
`--figures` prints the sizes of the export cells as well.
"""
import ast
import re
import statistics
import sys
from pathlib import Path
from typing import Iterator

import nbformat

ROOT = Path(__file__).resolve().parent.parent
EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break, ast.Pass)
MOST_LINES = 25
FEWEST_WORDS = 9


def code_of(source: str) -> str:
    "The cell as Python: magics and shell lines become comments."
    return re.sub(r"^(\s*)([%!])", r"\1# \2", source, flags=re.M)


def is_export(source: str) -> bool:
    return bool(re.search(r"^#\|\s*exports?i?\b", source, re.M))


def bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    "The blocks of one statement: of `if`, of `else`, of each `except` …"
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list) and block: yield block


def crowded(source: str) -> Iterator[int]:
    "Lines with a body behind a colon that is not a short exit."
    lines = source.encode().splitlines()        # col_offset counts bytes
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)): continue
        for block in bodies(node):
            first = block[0]
            before = lines[first.lineno - 1][:first.col_offset].rstrip()
            if before.endswith(b":") and not isinstance(first, EXITS): yield first.lineno


def is_counted(statement: ast.stmt) -> bool:
    "Not a docstring, and not `self.x = x`."
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant): return False
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1: return True
    target, value = statement.targets[0], statement.value
    plain = isinstance(target, ast.Attribute) and isinstance(value, ast.Name)
    return not (plain and target.attr == value.id)


def body_lines(function: ast.FunctionDef) -> int:
    counted = [s for s in function.body if is_counted(s)]
    return sum(s.end_lineno - s.lineno + 1 for s in counted)


def long_functions(source: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and (n := body_lines(node)) > MOST_LINES:
            yield node.name, n


def says_nothing(source: str) -> bool:
    "A prose cell of a few words that is neither a heading nor a formula nor a figure."
    text = source.strip()
    if text.startswith(("#", "$$", "![", "<", ":::", "|", "```", "**Next:**")): return False
    return len(re.findall(r"\S+", text)) < FEWEST_WORDS


def complaints(path: Path) -> Iterator[str]:
    for i, cell in enumerate(nbformat.read(path, 4).cells):
        where = f"{path.relative_to(ROOT)} cell {i}"
        if cell.cell_type == "markdown" and i and says_nothing(cell.source):
            yield f"{where}: prose that says nothing: {cell.source.strip()!r}"
        if cell.cell_type != "code": continue
        source = code_of(cell.source)
        for line in crowded(source):
            yield f"{where}, line {line}: a body on the line of its colon"
        if not is_export(source): continue
        for name, n in long_functions(source):
            yield f"{where}: {name} has {n} lines of body, at most {MOST_LINES}"


def figures(paths: list[Path]) -> str:
    "Sizes of the export cells, over all notebooks."
    cells = [c.source for p in paths for c in nbformat.read(p, 4).cells
             if c.cell_type == "code" and is_export(c.source)]
    sizes = sorted(len(re.sub(r"^#\|.*\n", "", s)) for s in cells)
    lines = [line for s in cells for line in s.splitlines() if line.strip()]
    at = lambda share: sizes[min(len(sizes) - 1, int(share * len(sizes)))]
    wide = sum(len(line) > 100 for line in lines)
    return (f"{len(cells)} export cells: characters, median {statistics.median(sizes):.0f}, "
            f"90 % at most {at(.9)}; lines over 100 columns: {wide} of {len(lines)}")


def main(words: list[str]) -> int:
    wanted = [w for w in words if not w.startswith("--")]
    found = [Path(w).resolve() for w in wanted] or sorted((ROOT / "nbs").rglob("*.ipynb"))
    paths = [p for p in found if ".ipynb_checkpoints" not in p.parts]
    wrong = [c for p in paths for c in complaints(p)]
    for line in wrong:
        print(line, file=sys.stderr)
    if "--figures" in words: print(figures(paths))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
