"""A merge driver for git: two versions of a notebook become one, cell by cell.

usage: python tools/merge_notebooks.py BASE OURS THEIRS

Cells are matched by their ids. A cell that one side changed, added, moved or removed is taken from
that side; where both changed the text of one cell, the lines are merged as git merges lines, and
what cannot be merged stands between marks inside that cell: the file opens in the Lab either way.
OURS receives the result. Exit code 1 says that something is left to look at.
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def read(path: str) -> dict:
    "A notebook; an empty file, which git gives where a side has none, is one without cells."
    text = Path(path).read_text(encoding="utf-8")
    return json.loads(text) if text.strip() else dict(cells=[])


def by_id(nb: dict) -> dict[str, dict]:
    return {cell.get("id", str(i)): cell for i, cell in enumerate(nb["cells"])}


def text_of(cell: dict | None) -> str:
    return "" if cell is None else "".join(cell["source"])


def merge_lines(base: str, ours: str, theirs: str) -> tuple[str, bool]:
    "The three as git merges lines, and whether something is left to do."
    with tempfile.TemporaryDirectory() as folder:
        names = []
        for name, text in dict(ours=ours, base=base, theirs=theirs).items():
            path = Path(folder) / name
            path.write_text(text + "\n", encoding="utf-8")
            names.append(str(path))
        labels = [w for name in ("ours", "base", "theirs") for w in ("-L", name)]
        done = subprocess.run(["git", "merge-file", "-p", *labels, *names],
                              capture_output=True, text=True, encoding="utf-8")
    return done.stdout.removesuffix("\n"), done.returncode != 0


def merge_cell(base: dict | None, ours: dict, theirs: dict) -> tuple[dict, bool]:
    "One cell that both sides have."
    if ours == theirs or theirs == base: return ours, False
    if ours == base: return theirs, False
    old, mine, other = text_of(base), text_of(ours), text_of(theirs)
    if other in (old, mine):
        text, left = mine, False
    elif mine == old:
        text, left = other, False
    else:
        text, left = merge_lines(old, mine, other)
    unchanged = lambda key: base is not None and theirs.get(key) == base.get(key)
    kept = {k: ours[k] if unchanged(k) else theirs.get(k, ours[k]) for k in ours}
    return kept | dict(source=text.splitlines(keepends=True)), left


def moved(order: list[str], base: dict[str, dict]) -> bool:
    "Does a side have the cells of the base in another order?"
    place = {cell: i for i, cell in enumerate(base)}
    known = [place[i] for i in order if i in place]
    return known != sorted(known)


def order_of(base: dict[str, dict], ours: dict[str, dict], theirs: dict[str, dict]) -> list[str]:
    "All ids: our order, or theirs where only they moved cells; what is new stands where it stood."
    first, second = list(ours), list(theirs)
    if moved(second, base) and not moved(first, base):
        first, second = second, first
    order = list(first)
    for k, new in enumerate(second):
        if new in order: continue
        before = next((i for i in reversed(second[:k]) if i in order), None)
        order.insert(0 if before is None else order.index(before) + 1, new)
    return order


def survivor(base: dict, one: dict) -> tuple[dict | None, bool]:
    "A cell that the other side removed: gone, unless this side changed its text."
    changed = text_of(one) != text_of(base)
    return (one if changed else None), changed


def merge(base: dict, ours: dict, theirs: dict) -> tuple[dict, list[str]]:
    "The merged notebook, and the ids of cells that someone has to look at."
    B, O, T = by_id(base), by_id(ours), by_id(theirs)
    cells, open_ones = [], []
    for i in order_of(B, O, T):
        b, o, t = B.get(i), O.get(i), T.get(i)
        if o is not None and t is not None:
            cell, left = merge_cell(b, o, t)
        elif b is not None:
            cell, left = survivor(b, o or t)
        else:
            cell, left = o or t, False
        if cell is not None: cells.append(cell)
        if left: open_ones.append(i)
    whole = ours if theirs.get("metadata") == base.get("metadata") else theirs
    return whole | dict(cells=cells), open_ones


def main(base: str, ours: str, theirs: str) -> int:
    merged, open_ones = merge(read(base), read(ours), read(theirs))
    text = json.dumps(merged, indent=1, ensure_ascii=False)
    Path(ours).write_text(text + "\n", encoding="utf-8")
    if open_ones:
        print(f"both sides changed {len(open_ones)} cells: {', '.join(open_ones)}; look at them",
              file=sys.stderr)
    return int(bool(open_ones))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
