"""Git hooks for this clone: notebooks merge by cells, and a commit is looked at before it is made.

usage: python tools/hooks.py [--remove]

Everything is written below .git/ of this clone, nothing into your home: a merge driver for *.ipynb
(tools/merge_notebooks.py), and a pre-commit hook that runs ruff, tools/style.py and the check for
clean notebooks.
`git commit --no-verify` goes past the hook once.
"""
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DRIVER = "merge.notebooks"
ATTRIBUTE = "*.ipynb merge=notebooks\n"
MARK = "# written by `make hooks`"


def git(*words: str, check: bool = True) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, check=check, capture_output=True, text=True)
    return done.stdout.strip()


def inside_git(name: str) -> Path:
    "A file of this clone's git folder; worktrees share some of them."
    return (ROOT / git("rev-parse", "--git-path", name)).resolve()


def pre_commit() -> str:
    "The hook. It looks at what is on disk, which is what a commit of all changes would hold."
    bin_ = Path(sys.executable).parent
    quoted = {name: shlex.quote(str(bin_ / name)) for name in ("ruff", "python")}
    return "\n".join([
        "#!/bin/sh", MARK, 'cd "$(git rev-parse --show-toplevel)" || exit 1',
        f"{quoted['ruff']} check --quiet nbs fact_nb tools || exit 1",
        f"{quoted['python']} tools/style.py || exit 1",
        f"{quoted['python']} tools/check.py clean || exit 1", ""])


def install() -> str:
    driver = shlex.join([sys.executable, str(ROOT / "tools" / "merge_notebooks.py")])
    git("config", "--local", f"{DRIVER}.name", "merge notebooks by cells")
    git("config", "--local", f"{DRIVER}.driver", f"{driver} %O %A %B")
    attributes = inside_git("info/attributes")
    attributes.parent.mkdir(parents=True, exist_ok=True)
    old = attributes.read_text() if attributes.exists() else ""
    if ATTRIBUTE not in old:
        attributes.write_text(old + ATTRIBUTE)
    hook = inside_git("hooks/pre-commit")
    if hook.exists() and MARK not in hook.read_text():
        return f"{hook} is there already and not ours: it was left as it is"
    hook.parent.mkdir(parents=True, exist_ok=True)
    hook.write_text(pre_commit())
    hook.chmod(0o755)
    return "hooks are installed in this clone; `python tools/hooks.py --remove` takes them out"


def remove() -> str:
    git("config", "--local", "--remove-section", DRIVER, check=False)
    attributes = inside_git("info/attributes")
    if attributes.exists():
        attributes.write_text(attributes.read_text().replace(ATTRIBUTE, ""))
    hook = inside_git("hooks/pre-commit")
    if hook.exists() and MARK in hook.read_text():
        hook.unlink()
    return "hooks are removed"


if __name__ == "__main__":
    try:
        print(remove() if "--remove" in sys.argv[1:] else install())
    except (OSError, subprocess.CalledProcessError):
        sys.exit("no git repository here: clone it with git to use hooks")
