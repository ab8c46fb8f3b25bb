"""What reaches a reader of the site: nbdev's own processing on a copy, no Quarto needed."""
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import nbformat
import pytest
from test_house import modules

from fact_nb.explain import comments_of, method_comments
from fact_nb.lab.documentation import Vocabulary, entry, members, places

ROOT = Path(__file__).resolve().parent.parent
PROCESS = "from nbdev.serve import proc_nbs; proc_nbs(n_workers=0)"
PICTURES = ("image/svg+xml", "image/png")


def notebooks(folder: Path) -> dict[str, nbformat.NotebookNode]:
    "Name below the folder → notebook."
    found = sorted(p for p in folder.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
    return {p.relative_to(folder).as_posix(): nbformat.read(p, 4) for p in found}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> tuple[dict, dict]:
    "The notebooks, and the pages that nbdev makes of them."
    copy = tmp_path_factory.mktemp("site")
    for name in ("nbs", "fact_nb"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "settings.ini", copy)
    where = os.environ | dict(PYTHONPATH=str(copy), OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", PROCESS], cwd=copy, env=where, timeout=600,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return notebooks(copy / "nbs"), notebooks(copy / "_proc")


def plain(text: str) -> str:
    "Without the links to names and the explained abbreviations that processing adds."
    text = re.sub(r"</?abbr[^>]*>| \{#about-[\w-]+\}", "", text)
    text = re.sub(r"\[(`[^`]+`)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\s+", " ", text).strip()


def is_hidden(cell) -> bool:
    return bool(re.search(r"^#\|\s*(hide|default_exp)\b", cell.source, re.M))


def pictures(nb) -> list[str]:
    "Figures and tables of the cells that a page may show."
    shown = [o.get("data", {}) for c in nb.cells if c.cell_type == "code" and not is_hidden(c)
             for o in c.outputs]
    kinds = (*PICTURES, "text/html", "text/markdown")
    return ["".join(data[k]).strip()[:400] for data in shown for k in kinds if k in data]


def lost(nb, page) -> list[str]:
    "Prose, figures and tables of a notebook that its page does not have."
    there = " ".join(plain(c.source) for c in page.cells if c.cell_type == "markdown")
    prose = [c.source for c in nb.cells if c.cell_type == "markdown"]
    title, *rest = prose
    heads = [t for t in title.splitlines() if t.strip() and not t.startswith(("# ", "> "))]
    missing = heads + [t for t in rest if plain(t) not in there]
    have = "\n".join("".join(v) for c in page.cells if c.cell_type == "code" for o in c.outputs
                     for v in o.get("data", {}).values())
    return [t[:70] for t in missing + [p for p in pictures(nb) if p not in have]]


def announced(page) -> list[str]:
    "Sentences that end in a colon, with nothing of what they announce after them."
    cells, found = page.cells, []
    for cell, after in zip(cells, [*cells[1:], None]):
        if cell.cell_type != "markdown" or not re.search(r"[^:]:\s*$", cell.source): continue
        if after is None or not shows_something(after): found.append(cell.source.strip()[-70:])
    return found


def shows_something(cell) -> bool:
    "Code, a fold, an entry, a list, a table, a formula."
    if cell.cell_type != "markdown": return True
    return cell.source.lstrip().startswith(("### `", "<", "|", "- ", "1. ", "$$", "```", "!", ":::"))


def test_nothing_is_lost_on_the_way(site):
    nbs, pages = site
    assert nbs.keys() == pages.keys() and len(nbs) > 70
    missing = {name: found for name in nbs if (found := lost(nbs[name], pages[name]))}
    assert not missing


def without_words(nb) -> list[str]:
    "Cells with a picture and no text for readers who cannot see it."
    return [c.source[:60] for c in nb.cells if c.cell_type == "code" and not is_hidden(c)
            and any(k in o.get("data", {}) for o in c.outputs for k in PICTURES)
            and "#| fig-alt:" not in c.source]


def test_every_picture_has_words(site):
    silent = {name: found for name, nb in site[0].items() if (found := without_words(nb))}
    assert not silent


def test_no_sentence_announces_what_the_page_hides(site):
    empty = {name: found for name, page in site[1].items() if (found := announced(page))}
    assert not empty


def notebook(*cells: str) -> nbformat.NotebookNode:
    "Code starts with a #, prose does not."
    new = [nbformat.v4.new_code_cell(c[1:]) if c.startswith("@") else nbformat.v4.new_markdown_cell(c)
           for c in cells]
    return nbformat.v4.new_notebook(cells=new)


def test_the_tests_of_pages_can_fail():
    "An introduction in the title's cell, a lost paragraph, a colon before a heading."
    assert lost(notebook("# T\n> s\n\nAn introduction."), notebook("x")) == ["An introduction."]
    assert lost(notebook("# T", "One.", "Two."), notebook("One.")) == ["Two."]
    assert not lost(notebook("# T", "See `f`."), notebook('See [`f`](a.html#f).'))
    assert announced(notebook("As in:", "## Next")) == ["As in:"]
    assert announced(notebook("As in:"))
    assert not announced(notebook("As in:", "@f(1)")) and not announced(notebook("As in:", "- a"))


# Entries.

@cache
def offered() -> tuple[str, ...]:
    "Full names of the public functions and classes."
    found = []
    for name in modules():
        module = importlib.import_module(f"fact_nb.{name}")
        for n in getattr(module, "__all__", ()):
            obj = getattr(module, n)
            here = (getattr(obj, "__module__", ""), getattr(obj, "__name__", "")) == (module.__name__, n)
            if here and (inspect.isfunction(obj) or inspect.isclass(obj)):
                found.append(f"{module.__name__}.{n}")
    return tuple(found)


def of(full_name: str):
    module, _, name = full_name.rpartition(".")
    return getattr(importlib.import_module(module), name)


WRONG = ("Call self as a function", "__main__", "NoneType", "<factory>", "<function", "&lt;function",
         "&lt;class", "at 0x")


def faults(full_name: str) -> list[str]:
    "What a reader of an entry would stumble over."
    obj = of(full_name)
    text = entry(obj, full_name, Vocabulary("page.html"))
    found = [w for w in WRONG if w in text]
    if not (obj.__doc__ or "").strip(): found.append("no docstring")
    call = re.search(r"```python\n(.*?)\n```", text, re.S)
    if call and "`" in call[1]: found.append("Markdown in the call")
    if "blob/main/" not in text: found.append("no source")
    if inspect.isfunction(obj):
        names = list(inspect.signature(obj).parameters)
        found += [f"{p} has no row" for p in names if not re.search(rf"<td><code>\**{p}</code>", text)]
    return found


def test_every_public_name_has_an_entry_one_can_use():
    assert len(offered()) > 500
    wrong = {name: found for name in offered() if (found := faults(name))}
    assert not wrong


def test_what_most_readers_need_is_explained_in_full():
    "Each parameter of the package's own names has its meaning."
    import fact_nb
    objects = [getattr(fact_nb, n) for n in fact_nb.__all__ if not inspect.ismodule(getattr(fact_nb, n))]
    for obj in objects:
        text = entry(obj, f"{obj.__module__}.{obj.__qualname__}", Vocabulary("page.html"))
        rows = re.findall(r"<tr><td><code>(\**\w+)</code></td>(.*?)</tr>", text)
        assert len(rows) >= len(inspect.signature(obj).parameters) - 1, obj
        empty = [name for name, cells in rows if cells.endswith("<td></td>")]
        assert not empty, (obj, empty)


EXPLAINED = ("networks", "machines", "data") # rooms in which every parameter has its meaning


def silent(obj) -> list[str]:
    "Parameters without a meaning, those of public methods included."
    shown = "```python" in entry(obj, f"{obj.__module__}.{obj.__qualname__}", Vocabulary("page.html"))
    given, said = inspect.signature(obj).parameters if shown else (), comments_of(obj)
    found = [p for p in given if not said.get(p)]
    for m in members(obj) if inspect.isclass(obj) else ():
        said = method_comments(obj, m.name)
        names = set(inspect.signature(m.obj).parameters) - {"self", "cls"}
        found += [f"{m.name}: {p}" for p in names if not said.get(p)]
    return found


def test_every_parameter_of_the_library_has_a_meaning():
    names = [n for n in offered() if n.split(".")[1] in EXPLAINED]
    assert len(names) > 300
    unexplained = {n: found for n in names if (found := silent(of(n)))}
    assert not unexplained


class Half:
    "One parameter has a meaning, one has not; its method has none."
    __module__ = "fact_nb.made_up" # only what the package wrote is looked at

    def __init__(self,
                 a, # a number
                 b,
                ): self.a, self.b = a, b

    def more(self, c): "Nothing."


def test_a_parameter_without_a_meaning_is_found():
    assert silent(Half) == ["b", "more: c"]


# Links.

def slug(heading: str) -> str:
    "The anchor that pandoc gives a heading."
    text = re.sub(r"\$[^$]*\$", lambda m: re.sub(r"[^\w]", "", m[0]), heading)
    text = re.sub(r"[`*]|\[|\]\([^)]*\)|\{[^}]*\}", "", text).strip().lower()
    text = re.sub(r"[^\w\s.-]", "", text)
    return re.sub(r"^[^a-z]+", "", re.sub(r"\s+", "-", text.strip()))


def page_of(name: str) -> str:
    folder, _, file = name.rpartition("/")
    file = re.sub(r"^\d+[a-z]?_", "", file).replace(".ipynb", ".html")
    return f"{folder}/{file}" if folder else file


def anchors(page) -> set[str]:
    "Everything on a page that a link can lead to."
    found = set()
    for c in page.cells:
        found |= set(re.findall(r"#\| label: (\S+)", c.source))
        if c.cell_type != "markdown": continue
        outside = re.sub(r"^```.*?^```", "", c.source, flags=re.M | re.S)
        found |= set(re.findall(r"\{#([^\s}]+)", outside)) | set(re.findall(r'id="([^"]+)"', outside))
        found |= {slug(h) for h in re.findall(r"^#+ (.*)$", outside, re.M) if "{#" not in h}
    return found


def links(page) -> list[str]:
    "Addresses inside the site, in prose and entries."
    found = []
    for c in page.cells:
        if c.cell_type != "markdown": continue
        outside = re.sub(r"^```.*?^```", "", c.source, flags=re.M | re.S)
        found += re.findall(r"\]\(([^)\s]+)\)", outside) + re.findall(r'href="([^"]+)"', outside)
    return [x for x in found if not re.match(r"https?:|mailto:", x)]


def test_links_lead_somewhere(site):
    "Every link inside the site has its page, and every anchor is on it."
    pages = {page_of(n): anchors(p) for n, p in site[1].items()}
    broken = {}
    for name, page in site[1].items():
        for link in links(page):
            target, _, anchor = link.partition("#")
            folder = os.path.dirname(name)
            where = page_of(os.path.normpath(os.path.join(folder, target)) if target else name)
            known = pages.get(where)
            if known is None and (ROOT / "nbs" / folder / target).exists(): continue
            if known is None or (anchor and anchor not in known):
                broken.setdefault(name, []).append(link)
    assert not broken


NAMED = re.compile(r"\[`([\w.]+)(?:\(\))?`\]\(([^)#]*\.html)?#([\w.]+)\)")


def test_names_lead_to_their_own_entries(site):
    "`measure` leads to measure, and stays inside the site."
    homes = {(h.page, h.anchor): n for n, h in places().items()}
    checked = 0
    for name, page in site[1].items():
        for c in page.cells:
            if c.cell_type != "markdown": continue
            for said, target, anchor in NAMED.findall(c.source):
                folder = os.path.dirname(page_of(name))
                where = os.path.normpath(os.path.join(folder, target)) if target else page_of(name)
                full = homes[where, anchor]
                assert full.endswith("." + said.removeprefix("fact_nb.")), f"{name}: {said} → {full}"
                checked += 1
    assert checked > 100


# The home page.

def test_cards_of_the_home_page():
    "Three cards of at most four lines; test_project.py pastes them."
    texts = [c.source for c in nbformat.read(ROOT / "nbs" / "index.ipynb", 4).cells]
    cards = next(t for t in texts if t.startswith("::::: {.cards}"))
    fences = re.findall(r"```(\w+)\n(.*?)```", cards, re.S)
    assert [kind for kind, _ in fences] == ["python", "python", "sh"]
    assert all(len(code.splitlines()) <= 4 for _, code in fences)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(code in readme for _, code in fences)
