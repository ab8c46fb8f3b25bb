"""Are the notebooks clean, and is fact_nb/ what they export?

usage: python tools/check.py clean|export

It works on a copy: nothing in the checkout is changed.
"""
import filecmp
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SCRATCH = {".ipynb_checkpoints", "__pycache__"}


class Check(NamedTuple):
    command: str  # of nbdev, run in the copy
    folder: str  # what it may change
    glob: str
    wrong: str  # what a difference means


CHECKS = {
    "clean": Check("nbdev_clean", "nbs", "*.ipynb", "not clean"),
    "export": Check("nbdev_export", "fact_nb", "*.py", "not what the notebooks export"),
}


def files(root: Path, check: Check) -> set[str]:
    found = (root / check.folder).rglob(check.glob)
    return {str(p.relative_to(root)) for p in found if not SCRATCH & set(p.parts)}


def copy_to(target: Path) -> None:
    target.mkdir()
    for name in ("nbs", "fact_nb"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns(*SCRATCH))
    for name in ("settings.ini", "setup.py", "README.md"):
        shutil.copy(ROOT / name, target / name)


def differences(copy: Path, check: Check) -> list[str]:
    before, after = files(ROOT, check), files(copy, check)
    same = lambda f: filecmp.cmp(ROOT / f, copy / f, shallow=False)
    return sorted((before ^ after) | {f for f in before & after if not same(f)})


def main(kind: str) -> int:
    check = CHECKS[kind]
    with tempfile.TemporaryDirectory() as tmp:
        copy = Path(tmp) / "copy"
        copy_to(copy)
        command = Path(sys.executable).with_name(check.command)
        done = subprocess.run([command], cwd=copy, capture_output=True, text=True)
        if done.returncode:
            print(done.stdout + done.stderr, file=sys.stderr)
            return 1
        bad = differences(copy, check)
    for f in bad:
        print(f"{f}: {check.wrong}; run: make export", file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
