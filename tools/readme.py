"""README.md from nbs/index.ipynb, its figure from the committed result, llms.txt from all pages.

usage: python tools/readme.py [--check]      --check: say whether both are current, change nothing

Through nbconvert, since nbdev_readme needs Quarto.
"""
import re
import sys
from pathlib import Path

import nbformat
import yaml
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
    "Links are relative to nbs/ in the notebook, to the root here; Quarto's labels and boxes go."
    text = re.sub(r"^:::.*\n?", "", text, flags=re.M)
    text = re.sub(r"(!\[[^\]]*\]\([^)]*\))\{[^}]*\}", r"\1", text)
    text = re.sub(r"\]\((?!https?:|#|/|mailto:)([^)]+)\)", r"](nbs/\1)", text)
    return text.replace("](nbs/../", "](")


def needed_first(cells: list) -> list:
    "A reader of the README has a clone before her: what it needs stands below the title."
    heading = "## What it needs\n\n"
    needed = next(c for c in cells if c.source.startswith(heading))
    needed.source = "**Needed:** " + needed.source.removeprefix(heading)
    title, *rest = (c for c in cells if c is not needed)
    return [title, needed, *rest]


def render() -> str:
    nb = nbformat.read(ROOT / "nbs" / "index.ipynb", 4)
    only_site = r"#\|\s*(hide|echo: false)|::: \{\.content-visible"
    shown = [c for c in nb.cells if not re.match(only_site, c.source)]
    nb.cells = [without_directives(c) for c in needed_first(shown)]
    nb.metadata["language_info"] = dict(name="python")
    text, _ = MarkdownExporter().from_notebook_node(nb)
    return MADE_FROM + re.sub(r"\n{3,}", "\n\n", for_the_root(text)).strip() + "\n"


def claim() -> str:
    "The figure that carries the claim: FACT and its rivals by layer."
    fig = depth.draw_forward(committed("depth"))
    fig.set_facecolor("white")      # a README is also read on a dark page that turns nothing
    return to_svg(fig).decode()


def in_order(contents: list) -> list[str]:
    "The notebooks of a sidebar, sections opened."
    found = []
    for item in contents:
        found += in_order(item["contents"]) if isinstance(item, dict) else [item]
    return list(dict.fromkeys(found))


def llms() -> str:
    "The site for a program that reads: every page with its subtitle, in reading order."
    site = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]
    lines = ["# fact_nb", ""]
    for name in in_order(site["sidebar"]["contents"]):
        title, _, subtitle = nbformat.read(ROOT / "nbs" / name, 4).cells[0].source.partition("\n")
        folder, _, file = name.rpartition("/")
        page = f"{folder}/".lstrip("/") + re.sub(r"^\d+_", "", file).replace(".ipynb", ".html")
        lines.append(f"- [{title.lstrip('# ')}]({page}): {subtitle.lstrip('> ')}")
    return "\n".join(lines) + "\n"


def main(check: bool) -> int:
    files = {ROOT / "README.md": render(), ROOT / "nbs" / "claim.svg": claim(),
             ROOT / "nbs" / "llms.txt": llms()}
    if not check:
        for p, new in files.items():
            p.write_text(new, encoding="utf-8")
        return 0
    old = [p.name for p, new in files.items()
           if not p.exists() or p.read_text(encoding="utf-8") != new]
    if old:
        print(f"{', '.join(old)}: not what the notebooks and results/depth say; run: make readme",
              file=sys.stderr)
    return int(bool(old))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
