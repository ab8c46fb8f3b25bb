"""README.md from nbs/index.ipynb, through nbconvert (nbdev_readme needs Quarto), and the figure that both show, from the committed result.

usage: python tools/readme.py [--check]      --check: say whether README.md is up to date, change nothing
"""
import re
import sys
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

from fact_nb.experiments import depth
from fact_nb.figures import to_svg
from fact_nb.store import Store

ROOT = Path(__file__).resolve().parent.parent


def render() -> str:
    nb = nbformat.read(ROOT / "nbs" / "index.ipynb", 4)
    nb.cells = [c for c in nb.cells if not re.match(r"#\|\s*hide", c.source)]
    nb.metadata["language_info"] = dict(name="python")
    for c in nb.cells:
        c.source = re.sub(r"^#\|.*\n", "", c.source, flags=re.M)
        if c.cell_type == "code": c.outputs = []
    text, _ = MarkdownExporter().from_notebook_node(nb)
    text = re.sub(r"(!\[[^\]]*\]\([^)]*\))\{[^}]*\}", r"\1", text)  # Quarto's labels of figures
    text = re.sub(r"\]\((?!https?:|#|/|mailto:)([^)]+)\)", r"](nbs/\1)", text)  # links are relative to nbs/ there, to the root here
    text = text.replace("](nbs/../", "](")
    return "<!-- made from nbs/index.ipynb by `make readme`; edit that -->\n\n" + re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def claim() -> str:
    "The figure that carries the claim: FACT and its rivals by layer."
    return to_svg(depth.draw_forward(Store(ROOT / "results").load("depth", "cpu"))).decode()


def main(check: bool) -> int:
    files = {ROOT / "README.md": render(), ROOT / "nbs" / "claim.svg": claim()}
    if check:
        old = [p.name for p, new in files.items() if not p.exists() or p.read_text(encoding="utf-8") != new]
        if old: print(f"{', '.join(old)}: not what nbs/index.ipynb and results/depth say; run: make readme", file=sys.stderr)
        return int(bool(old))
    for p, new in files.items(): p.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__": sys.exit(main("--check" in sys.argv[1:]))
