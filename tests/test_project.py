"""The repository itself: site structure, README, packaging, the Makefile's messages."""
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import nbformat
import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from style import body_lines, code_of, is_export  # noqa: E402

NOTEBOOKS = sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)


def contents(items):
    "File names of a Quarto sidebar, sections flattened."
    for i in items:
        if isinstance(i, str): yield i
        elif "contents" in i: yield from contents(i["contents"])
        else: yield i["href"]


def test_sidebar_lists_every_notebook_once():
    site = yaml.safe_load((ROOT / "_quarto.yml").read_text())
    listed = list(contents(site["website"]["sidebar"]["contents"]))
    assert sorted(listed) == sorted(str(p.relative_to(ROOT / "nbs")) for p in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_opens_as_it_should(path):
    nb = nbformat.read(path, 4)
    first = nb.cells[0]
    assert first.cell_type == "markdown" and re.match(r"# .+\n> .+", first.source), "title and one-line subtitle first"
    assert path.stat().st_size < 2_000_000
    assert len({c.id for c in nb.cells}) == len(nb.cells)


def anchors(path):
    "Where a link into a notebook can point: its headings, as pandoc names them."
    heads = re.findall(r"^#+ (.+)$", "\n".join(c.source for c in nbformat.read(path, 4).cells if c.cell_type == "markdown"), re.M)
    return {re.sub(r"^[^a-z]+", "", re.sub(r"\s+", "-", re.sub(r"[^\w\s.-]", "", h.lower()).strip())) for h in heads}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_links_and_references_resolve(path):
    nb = nbformat.read(path, 4)
    text = "\n".join(c.source for c in nb.cells if c.cell_type == "markdown")
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text): assert (path.parent / target).exists(), target
    labels = set(re.findall(r"\{#((?:eq|fig|tbl|sec)-[\w-]+)", text)) | set(re.findall(r"^#\| label: (\S+)", "\n".join(c.source for c in nb.cells if c.cell_type == "code"), re.M))
    for ref in re.findall(r"@((?:eq|fig|tbl|sec)-[\w-]+\w)", text): assert ref in labels, ref
    for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)#([\w-]+)\)", text): assert anchor in anchors(path.parent / target if target else path), f"{target}#{anchor}"
    bib = set(re.findall(r"@\w+\{([\w-]+),", (ROOT / "nbs" / "references.bib").read_text()))
    for cite in re.findall(r"\[@([\w-]+)", text): assert cite in bib or re.match("eq-|fig-|tbl-|sec-", cite), cite


SHOWS = re.compile(r"(display|print|pd\.DataFrame|pd\.concat|rep\.table)\(")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_what_is_shown_was_run(path):
    "Cells that draw, print or end in a table carry their output, since the site is built from what is stored. No output is an error or names a folder of somebody's machine."
    for i, c in enumerate(nbformat.read(path, 4).cells):
        if c.cell_type != "code": continue
        flags = set(re.findall(r"^#\|\s*(\w+)", c.source, re.M))
        last = c.source.strip().splitlines()[-1] if c.source.strip() else ""
        shows = "label" in flags or SHOWS.match(last)
        if shows and not flags & {"hide", "export", "exporti", "eval"}: assert c.outputs, f"cell {i} has no output; run: python tools/outputs.py {path.name}\n{c.source}"
        for o in c.outputs:
            assert o.output_type != "error", f"cell {i}"
            text = json.dumps(o.get("data", {}).get("text/plain", "")) + json.dumps(o.get("text", ""))
            assert not re.search(r"(/tmp/|/home/|/root/|/Users/)", text), f"cell {i}: {text[:200]}"


def test_every_notebook_says_what_comes_next():
    "A reader never ends in a blind alley."
    site = yaml.safe_load((ROOT / "_quarto.yml").read_text())
    *path, last = contents(site["website"]["sidebar"]["contents"])
    text = lambda p: "\n".join(c.source for c in nbformat.read(ROOT / "nbs" / p, 4).cells if c.cell_type == "markdown")
    assert not [p for p in path if p != "index.ipynb" and "**Next:**" not in text(p)]


def test_every_notebook_can_be_made_into_a_page(monkeypatch):
    "What nbdev does before Quarto: it fails on a show_doc whose types are not defined yet, and on cells that mix imports and code."
    from execnb.nbio import read_nb
    from nbdev.processors import FilterDefaults
    monkeypatch.chdir(ROOT / "nbs")
    monkeypatch.setenv("IN_TEST", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for path in NOTEBOOKS: FilterDefaults()(read_nb(path))


def lines_of_work(statement):
    "Lines of a statement; of a function its body, of a class none: its methods are judged by tools/style.py."
    if isinstance(statement, ast.ClassDef): return 0
    if isinstance(statement, ast.FunctionDef): return body_lines(statement)
    return statement.end_lineno - statement.lineno + 1


def test_no_export_cell_is_long():
    "Signatures with a comment for each parameter do not count, nor does a class, which is not cut up to pass."
    long = []
    for path in NOTEBOOKS:
        for i, c in enumerate(nbformat.read(path, 4).cells):
            if c.cell_type != "code" or not is_export(c.source): continue
            n = sum(map(lines_of_work, ast.parse(code_of(c.source)).body))
            if n > 30: long.append(f"{path.name} cell {i}: {n} lines")
    assert not long, long


def test_readme_is_made_from_index():
    done = subprocess.run([sys.executable, "tools/readme.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_readme_begins_with_what_is_needed():
    head = (ROOT / "README.md").read_text()[:700]
    assert "Python ≥ 3.11" in head and "apt-get install make python3-venv" in head and "3 GB" in head
    assert head.index("make reproduce") < head.index("make test")


def test_constraints_and_settings():
    constraints = (ROOT / "constraints.txt").read_text()
    assert re.search(r"^torch==2\.13\.0$", constraints, re.M), "no local tag"
    settings = (ROOT / "settings.ini").read_text()
    requirements = re.search(r"^requirements = (.*)$", settings, re.M)[1].split()
    assert all(">=" in r for r in requirements), "lower bounds only"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    "A folder with the package as the wheel holds it, in `site`."
    tmp = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, tmp / "src", ignore=shutil.ignore_patterns(".venv", ".git", "results", "nbs", "report", "_proc", "_docs", "build", "dist", "*.egg-info"))
    done = subprocess.run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp)], cwd=tmp / "src", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(next(tmp.glob("*.whl"))) as z: z.extractall(tmp / "site"); names = z.namelist()
    assert {"fact_nb/py.typed", "fact_nb/lab/claims.toml", "fact_nb/lab/history.toml"} <= set(names) and not any(n.startswith(("nbs/", "tests/", "tools/")) for n in names)
    return tmp


BLOCKED = """import sys
sys.path.insert(0, sys.argv.pop(1))
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('nbdev', 'execnb', 'IPython', 'jupyterlab', 'ipykernel'): raise ImportError(name)
sys.meta_path.insert(0, Block())
import runpy, fact_nb
assert '/site/' in fact_nb.__file__
"""


def from_wheel(wheel, code, cwd, *args):
    "Run code against the wheel's package alone: no repository, no nbdev, no Jupyter."
    return subprocess.run([sys.executable, "-I", "-c", BLOCKED + code, str(wheel / "site"), *args], cwd=cwd, capture_output=True, text=True, timeout=600, env=dict(os.environ, OMP_NUM_THREADS="1"))


def test_wheel_works_without_nbdev_jupyter_or_the_repository(wheel, tmp_path):
    assert "fact=fact_nb.lab.cli:main" in next((wheel / "site").glob("*.dist-info/entry_points.txt")).read_text().replace(" ", "")
    done = from_wheel(wheel, "import pkgutil, importlib\nfor m in pkgutil.walk_packages(fact_nb.__path__, 'fact_nb.'):\n    if not m.name.endswith('__main__'): importlib.import_module(m.name)\n", tmp_path)
    assert done.returncode == 0, done.stderr


def test_quick_starts_can_be_pasted(wheel, tmp_path):
    "Each Python block of the README, and the commands of its last quick start, in an empty folder."
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", readme, re.S)
    assert len(blocks) >= 2
    printed = []
    for code in blocks:
        done = from_wheel(wheel, code, tmp_path)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    table, score = printed[:2]                                                # pasted into a file, they still show their result
    assert table.split()[:5] == ["FACT", "r(FACT)", "AGOP^½", "eNFA", "residual"] and max(map(len, table.splitlines())) <= 80
    assert .9 < float(score) <= 1
    for line in re.search(r"## Rerun a figure.*?```sh\n(.*?)```", readme, re.S)[1].splitlines():
        words = line.split("#")[0].split()
        done = from_wheel(wheel, "runpy.run_module('fact_nb', run_name='__main__')", tmp_path, *words[1:])
        assert words[0] == "fact" and done.returncode == 0, done.stderr
    assert (tmp_path / "report" / "index.html").exists()


def make(*args, **env):
    return subprocess.run(["make", *args], cwd=ROOT, capture_output=True, text=True, env=dict(os.environ, **env))


def test_make_says_what_is_missing():
    done = make("needs", "PYTHON=no-such-python")
    assert done.returncode != 0 and "apt-get install make python3-venv" in done.stdout


@pytest.mark.skipif(shutil.which("quarto") is not None, reason="Quarto is installed")
def test_make_docs_without_quarto_says_how_to_get_it():
    done = make("docs")
    assert done.returncode != 0 and "quarto.org" in done.stdout and not (ROOT / "_proc").exists()


def test_workflows_pin_actions_and_ask_for_little():
    for path in (ROOT / ".github" / "workflows").glob("*.yaml"):
        flow = yaml.safe_load(path.read_text())
        assert flow["permissions"] == {"contents": "read"}
        for uses in re.findall(r"uses: (\S+)", path.read_text()): assert re.search(r"@[0-9a-f]{40}$", uses), uses


@pytest.mark.parametrize("kind, damage", [("clean", lambda r: add_execution_count(r / "nbs" / "00_linalg.ipynb")), ("export", lambda r: (r / "fact_nb" / "linalg.py").write_text("x = 1\n"))])
def test_checks_find_what_they_look_for(tmp_path, kind, damage):
    copy = tmp_path / "repo"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "results", "_proc"))
    damage(copy)
    done = subprocess.run([sys.executable, "tools/check.py", kind], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 1 and "run: make export" in done.stderr and "linalg" in done.stderr


def add_execution_count(path: Path) -> None:
    nb = json.loads(path.read_text())
    next(c for c in nb["cells"] if c["cell_type"] == "code")["execution_count"] = 7
    path.write_text(json.dumps(nb))
