"""`make hooks` writes into this clone only, and a commit that breaks the style is refused."""
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def clone(tmp_path):
    "A repository with our files, a home of its own, and the hooks."
    repo, home = tmp_path / "a clone", tmp_path / "home"
    home.mkdir()
    leave = shutil.ignore_patterns(".venv", ".git", "results", "_proc", "*_cache", "__pycache__")
    shutil.copytree(ROOT, repo, ignore=leave)
    env = dict(os.environ, HOME=str(home), GIT_AUTHOR_NAME="a", GIT_AUTHOR_EMAIL="a@example.org",
               GIT_COMMITTER_NAME="a", GIT_COMMITTER_EMAIL="a@example.org")

    def run(*words):
        return subprocess.run(words, cwd=repo, env=env, capture_output=True, text=True)

    run("git", "init", "-q")
    run("git", "add", "-A")
    run("git", "commit", "-qm", "all")
    assert run(sys.executable, "tools/hooks.py").returncode == 0
    return repo, home, run


def test_nothing_is_written_into_the_home(clone):
    repo, home, run = clone
    assert not list(home.iterdir())
    assert "merge_notebooks.py" in run("git", "config", "--local", "merge.notebooks.driver").stdout
    assert run("git", "check-attr", "merge", "nbs/index.ipynb").stdout.strip().endswith("merge: notebooks")
    run(sys.executable, "tools/hooks.py", "--remove")
    assert not (repo / ".git" / "hooks" / "pre-commit").exists()
    assert run("git", "check-attr", "merge", "nbs/index.ipynb").stdout.strip().endswith("unspecified")


def test_a_commit_is_looked_at(clone):
    repo, _, run = clone
    path = repo / "nbs" / "03_arguments.ipynb"
    nb = nbformat.read(path, 4)
    nb.cells.append(nbformat.v4.new_code_cell("x = 1; y = 2", id="0badcafe"))
    nbformat.write(nb, path)
    refused = run("git", "commit", "-qam", "two statements")
    assert refused.returncode == 1 and "E702" in refused.stdout + refused.stderr
    run("git", "checkout", "-q", "--", ".")
    (repo / "CHANGELOG.md").write_text("fine")
    assert run("git", "commit", "-qam", "fine").returncode == 0


def test_a_hook_of_ones_own_stays(clone):
    repo, _, run = clone
    hook = repo / ".git" / "hooks" / "pre-commit"
    hook.write_text("#!/bin/sh\nexit 0\n")
    assert "not ours" in run(sys.executable, "tools/hooks.py").stdout
    run(sys.executable, "tools/hooks.py", "--remove")
    assert hook.read_text() == "#!/bin/sh\nexit 0\n"


@pytest.fixture
def branches(tmp_path):
    """A repository with one notebook; `on(branch, change)` commits a change on a branch of its own,
    `merged()` merges the second into the first."""
    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        return subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, text=True)

    path = tmp_path / "a.ipynb"
    make = nbformat.v4.new_code_cell
    cells = [make(f"x{i} = {i}\ny{i} = {i}", id=f"cell{i}") for i in range(4)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    git("init", "-q", "-b", "start")
    driver = shlex.join([sys.executable, str(ROOT / "tools" / "merge_notebooks.py")])
    git("config", "merge.notebooks.driver", f"{driver} %O %A %B")
    (tmp_path / ".gitattributes").write_text("*.ipynb merge=notebooks\n")
    git("add", "-A")
    git("commit", "-qm", "start")

    def on(branch, change):
        git("checkout", "-q", "-b", branch, "start")
        nb = nbformat.read(path, 4)
        change(nb.cells)
        nbformat.write(nb, path)
        git("commit", "-qam", branch)

    def merged():
        git("checkout", "-q", "ours")
        done = git("merge", "-q", "theirs", "-m", "merge")
        return done.returncode, {c.id: c.source for c in nbformat.read(path, 4).cells}

    return on, merged


def test_a_merge_keeps_the_work_of_both_sides(branches):
    on, merged = branches
    make = nbformat.v4.new_code_cell

    def ours(cells):
        cells[0].source = cells[0].source.replace("x0 = 0", "x0 = 10")
        cells.insert(2, make("ours = 1", id="ours"))
        cells[3].source = "only ours"

    def theirs(cells):
        cells[0].source += "\nz0 = 0"
        cells.insert(2, make("theirs = 1", id="theirs"))
        del cells[4]

    on("ours", ours)
    on("theirs", theirs)
    failed, cells = merged()
    assert not failed
    assert list(cells) == ["cell0", "cell1", "theirs", "ours", "cell2"]
    assert cells["cell0"] == "x0 = 10\ny0 = 0\nz0 = 0" and cells["cell2"] == "only ours"


def test_a_cell_that_both_changed_is_shown_with_both(branches):
    on, merged = branches
    on("ours", lambda cells: cells[1].update(source="ours"))
    on("theirs", lambda cells: cells[1].update(source="theirs"))
    failed, cells = merged()
    assert failed and list(cells) == [f"cell{i}" for i in range(4)]
    assert "<<<<<<<" in cells["cell1"] and "ours" in cells["cell1"] and "theirs" in cells["cell1"]


def test_a_cell_that_one_removed_and_the_other_changed_stays(branches):
    on, merged = branches
    on("ours", lambda cells: cells.pop(1))
    on("theirs", lambda cells: cells[1].update(source="changed"))
    failed, cells = merged()
    assert failed and cells["cell1"] == "changed"


def test_cells_that_one_side_moved_are_moved(branches):
    on, merged = branches
    on("ours", lambda cells: cells[1].update(source="changed"))
    on("theirs", lambda cells: cells.insert(0, cells.pop(3)))
    failed, cells = merged()
    assert not failed and list(cells) == ["cell3", "cell0", "cell1", "cell2"]
    assert cells["cell1"] == "changed"
