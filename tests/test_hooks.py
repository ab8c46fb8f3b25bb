"""`make hooks` writes into this clone only, and a commit that breaks the style is refused."""
import os
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
    assert "nbdev_merge" in run("git", "config", "--local", "merge.nbdev-merge.driver").stdout
    assert run("git", "check-attr", "merge", "nbs/index.ipynb").stdout.strip().endswith("nbdev-merge")
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
