"""Are the notebooks clean, and is fact_nb/ what they export? Works on a copy: nothing in the checkout is changed.

usage: python tools/check.py clean|export
"""
import filecmp
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIX = dict(clean="nbdev_clean", export="nbdev_export")
WHAT = dict(clean=("nbs", "*.ipynb", "not clean"), export=("fact_nb", "*.py", "not what the notebooks export"))


def files(root: Path, folder: str, glob: str) -> set[str]:
    return {str(p.relative_to(root)) for p in (root / folder).rglob(glob) if not {".ipynb_checkpoints", "__pycache__"} & set(p.parts)}


def main(kind: str) -> int:
    folder, glob, wrong = WHAT[kind]
    with tempfile.TemporaryDirectory() as tmp:
        copy = Path(tmp) / "copy"
        copy.mkdir()
        for name in ("nbs", "fact_nb"): shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
        for name in ("settings.ini", "setup.py", "README.md"): shutil.copy(ROOT / name, copy / name)
        command = Path(sys.executable).with_name(FIX[kind])
        done = subprocess.run([command], cwd=copy, capture_output=True, text=True)
        if done.returncode: print(done.stdout + done.stderr, file=sys.stderr); return 1
        before, after = files(ROOT, folder, glob), files(copy, folder, glob)
        bad = sorted((before ^ after) | {f for f in before & after if not filecmp.cmp(ROOT / f, copy / f, shallow=False)})
    for f in bad: print(f"{f}: {wrong}; run: make export", file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__": sys.exit(main(sys.argv[1]))
