"""README.md from nbs/index.ipynb, and the figure that both show, from the committed result.

usage: python tools/readme.py [--check]      --check: say whether both are current, change nothing

Through nbconvert, since nbdev_readme needs Quarto.
"""
import re
import sys
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

from fact_nb.experiments import depth
from fact_nb.figures import to_svg
from fact_nb.lab.store import committed

ROOT = Path(__file__).resolve().parent.parent
MADE_FROM = "<!-- made from nbs/index.ipynb by `make readme`; edit that -->\n\n"


def without_directives(cell: nbformat.NotebookNode) -> nbformat.NotebookNode:
    cell.source = re.sub(r"^#\|.*\n", "", cell.source, flags=re.M)
    if cell.cell_type == "code":
        cell.outputs = []
    return cell


def for_the_root(text: str) -> str:
    "Links are relative to nbs/ in the notebook, to the root here; Quarto's labels of figures go."
    text = re.sub(r"(!\[[^\]]*\]\([^)]*\))\{[^}]*\}", r"\1", text)
    text = re.sub(r"\]\((?!https?:|#|/|mailto:)([^)]+)\)", r"](nbs/\1)", text)
    return text.replace("](nbs/../", "](")


def render() -> str:
    nb = nbformat.read(ROOT / "nbs" / "index.ipynb", 4)
    shown = [c for c in nb.cells if not re.match(r"#\|\s*hide", c.source)]
    nb.cells = [without_directives(c) for c in shown]
    nb.metadata["language_info"] = dict(name="python")
    text, _ = MarkdownExporter().from_notebook_node(nb)
    return MADE_FROM + re.sub(r"\n{3,}", "\n\n", for_the_root(text)).strip() + "\n"


def claim() -> str:
    "The figure that carries the claim: FACT and its rivals by layer."
    return to_svg(depth.draw_forward(committed("depth"))).decode()


def main(check: bool) -> int:
    files = {ROOT / "README.md": render(), ROOT / "nbs" / "claim.svg": claim()}
    if not check:
        for p, new in files.items():
            p.write_text(new, encoding="utf-8")
        return 0
    old = [p.name for p, new in files.items()
           if not p.exists() or p.read_text(encoding="utf-8") != new]
    if old:
        print(f"{', '.join(old)}: not what nbs/index.ipynb and results/depth say; run: make readme",
              file=sys.stderr)
    return int(bool(old))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
