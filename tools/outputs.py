"""Execute the notebooks and save their outputs. Cells flagged slow, gpu or `eval: false` keep the outputs they have.

usage: python tools/outputs.py [--slow] [notebook …]      without names: all of nbs/; --slow: run cells flagged slow too
"""
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
CFG = ConfigParser(delimiters=["="])
CFG.read(ROOT / "settings.ini")
FLAGS = CFG["DEFAULT"]["tst_flags"].split()


def skipped(source: str) -> bool:
    "Is this cell flagged so that the tests do not run it either?"
    flags = re.findall(r"^#\|[ \t]*(\w+):?[ \t]*(\S*)", source, re.M)
    return any(name in FLAGS or (name, value) == ("eval", "false") for name, value in flags)


def execute(path: Path) -> None:
    nb = nbformat.read(path, 4)
    run = nbformat.from_dict(nb)
    for c in run.cells:
        if c.cell_type == "code" and skipped(c.source): c.source = ""
    NotebookClient(run, timeout=1200, kernel_name="python3", resources=dict(metadata=dict(path=str(path.parent)))).execute()
    for old, new in zip(nb.cells, run.cells):
        if old.cell_type != "code" or skipped(old.source): continue
        # progress bars and warnings go to stderr: they are for the person at the screen, not for the page
        old.outputs = [o for o in new.outputs if o.get("name") != "stderr" and "application/vnd.jupyter.widget-view+json" not in o.get("data", {})]
    nbformat.write(nb, path)
    subprocess.run([Path(sys.executable).with_name("nbdev_clean"), "--fname", str(path)], check=True, cwd=ROOT)


def main(names: list[str]) -> int:
    if "--slow" in names: FLAGS.remove("slow"); names.remove("--slow")
    paths = [Path(n).resolve() for n in names] or sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
    failed = []
    for p in (bar := tqdm(paths)):
        bar.set_description(p.name)
        try: execute(p)
        except CellExecutionError as e: failed.append(p.name); print(f"{p}:\n{e}", file=sys.stderr)
    if failed: print(f"failed, left as they were: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
