"""The rooms of the package: which may import which, what they offer, and where names lead."""
import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import nbformat
import pytest

import fact_nb

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fact_nb"
NOTEBOOKS = sorted(p for p in (ROOT / "nbs").rglob("*.ipynb")
                   if ".ipynb_checkpoints" not in p.parts)

# A room imports from the rooms named beside it, and from itself where True.
ROOMS = {
    "": {""},
    "data": {"", "data"},
    "networks": {"", "data", "networks"},
    "machines": {"", "data", "machines"},
    "integrations": {"", "data", "networks", "machines", "integrations"},
    "lab": {"", "data", "networks", "machines", "lab"},
    "experiments": {"", "data", "networks", "machines", "lab"},
    "bench": {"", "data", "networks", "machines", "lab"},
}
# The one arrow against the order: lab finds experiments and benchmarks by name, at run time.
BY_NAME = {("lab", "experiments"), ("lab", "bench")}


@cache
def modules() -> tuple[str, ...]:
    "All modules below fact_nb, as dotted names without it."
    found = pkgutil.walk_packages(fact_nb.__path__, "fact_nb.")
    return tuple(m.name.removeprefix("fact_nb.") for m in found if not m.ispkg)


def room(module: str) -> str:
    return module.rpartition(".")[0]


def source_of(module: str) -> Path:
    return PACKAGE / (module.replace(".", "/") + ".py")


def imports(module: str) -> list[tuple[str, str, bool]]:
    "(imported module, name, at the top level) for what a module takes from the package."
    tree = ast.parse(source_of(module).read_text(encoding="utf-8"))
    top = set(map(id, tree.body))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom): found += from_import(module, node, id(node) in top)
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name.startswith("fact_nb")]
            found += [(n.removeprefix("fact_nb").lstrip("."), "", id(node) in top) for n in names]
    return found


def from_import(module: str, node: ast.ImportFrom, top: bool) -> list[tuple[str, str, bool]]:
    "The targets of `from x import a, b`; a name that is a module itself counts as that module."
    if node.level:
        parts = ("fact_nb." + module).split(".")[:-node.level]
        base = ".".join([*parts, *([node.module] if node.module else [])])
    else:
        base = node.module or ""
    if base.split(".")[0] != "fact_nb": return []
    base = base.removeprefix("fact_nb").lstrip(".")
    known = set(modules())
    out = []
    for a in node.names:
        inner = f"{base}.{a.name}".lstrip(".")
        out.append((inner, "", top) if inner in known else (base, a.name, top))
    return out


@pytest.mark.parametrize("module", [m for m in modules() if m != "__main__"])
def test_arrows(module):
    "Data flows one way: a room imports only from the rooms above it."
    here, known = room(module), set(modules())
    for target, name, top in imports(module):
        there = room(target) if target in known else target
        if (here, there) in BY_NAME and not top: continue
        assert there in ROOMS[here], f"{module} imports {target} {name}, against the order of rooms"
        assert here not in ("experiments", "bench") or there != here, f"{module} imports {target}"


@pytest.mark.parametrize("module", modules())
def test_no_module_takes_a_private_name(module):
    taken = [f"{t}.{n}" for t, n, _ in imports(module) if n.startswith("_") and not n.startswith("__")]
    assert not taken, f"{module} imports {taken}: give it a public name, or move it"


def test_an_arrow_that_does_not_exist_is_seen():
    "The reader of imports finds both kinds of import, at the top and inside functions."
    found = {t for t, _, _ in imports("lab.cli")} | {t for t, _, _ in imports("networks.measure")}
    assert {"lab.store", "networks.accumulate"} <= found
    assert any(not top for _, _, top in imports("lab.cli"))


def test_no_module_at_the_root_has_a_public_name():
    "Importing a submodule rebinds the name in its package."
    below = {m.name for m in pkgutil.iter_modules(fact_nb.__path__)}
    assert not below & set(fact_nb.__all__)


def test_the_root_is_light():
    "`import fact_nb` loads nothing heavy."
    heavy = "('torch', 'matplotlib', 'pandas', 'numpy')"
    code = f"import sys, fact_nb; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@cache
def public() -> dict[str, list[str]]:
    "Public name → the modules that offer it."
    where = defaultdict(list)
    for m in modules():
        if m == "__main__": continue
        for name in getattr(importlib.import_module(f"fact_nb.{m}"), "__all__", []): where[name].append(m)
    return where


def test_public_names_are_unique():
    "One name, one place. Experiments and benchmarks share `experiment` and `bench`, by which they are found; each trainer has its FactCallback."
    twice = {n: ms for n, ms in public().items() if len(ms) > 1}
    shared = {"experiment": "experiments", "bench": "bench", "FactCallback": "integrations"}
    wrong = {n: ms for n, ms in twice.items() if any(room(m) != shared.get(n) for m in ms)}
    assert not wrong


@cache
def lookup():
    "nbdev's table of symbols."
    from nbdev.doclinks import NbdevLookup
    return NbdevLookup()


def own_module(nb) -> str:
    "The module that a notebook writes, or ''."
    found = [m[1] for c in nb.cells if (m := re.search(r"^#\| default_exp (\S+)", c.source, re.M))]
    return found[0] if found else ""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: str(p.relative_to(ROOT / "nbs")))
def test_backticked_names_lead_to_their_place(path):
    "nbdev links `name` to the page that documents it: that page must be the name's one public home."
    look, homes = lookup(), public()
    nb = nbformat.read(path, 4)
    here = own_module(nb)
    for c in nb.cells:
        if c.cell_type != "markdown": continue
        for name in re.findall(r"(?<![\[`])`(\w+)`(?!\])", c.source):
            if name not in homes: continue
            entry = look[name]
            if entry is None: continue
            led = entry[1].removeprefix("fact_nb/").removesuffix(".py").replace("/", ".")
            home = here if here in homes[name] else homes[name][0]
            assert led == home, f"`{name}` leads to {led}, its home is {home}"


@pytest.mark.parametrize("package", ["", "data", "networks", "machines", "integrations", "lab"])
def test_the_house_names_every_room(package):
    "The table that a contributor reads first lists each module of each package, once."
    house = nbformat.read(ROOT / "nbs" / "house.ipynb", 4)
    table = next(c.source for c in house.cells if c.source.startswith("## Rooms"))
    name = f"fact_nb.{package}".rstrip(".")
    row = next(line for line in table.splitlines() if line.startswith(f"| `{name}` |"))
    listed = re.findall(r"`(\w+)`", row.split("|")[2])
    there = {m.rpartition(".")[2] for m in modules() if room(m) == package}
    assert sorted(listed) == sorted(m for m in there if not m.startswith("_"))
