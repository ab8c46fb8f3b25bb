"""Execute the notebooks and save their outputs.

usage: python tools/outputs.py [--slow] [notebook …]      without names: all of nbs/

Cells flagged slow, gpu or `eval: false` keep the outputs they have; `--slow` runs the slow ones.
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
SETTINGS = ConfigParser(delimiters=["="])
SETTINGS.read(ROOT / "settings.ini")
FLAGS = SETTINGS["DEFAULT"]["tst_flags"].split()
# Figures are saved as vectors, the same bytes each time.
PREFACE = """
import matplotlib
from matplotlib_inline.config import InlineBackend
matplotlib.rcParams["svg.hashsalt"] = "fact_nb"
backend = InlineBackend.instance(parent=get_ipython())
backend.figure_formats = {"svg"}
backend.print_figure_kwargs = {"bbox_inches": "tight", "metadata": {"Date": None}}
del backend, matplotlib, InlineBackend
"""
WIDGET = "application/vnd.jupyter.widget-view+json"


def skipped(source: str, flags: list[str]) -> bool:
    "Is this cell flagged so that the tests do not run it either?"
    found = re.findall(r"^#\|[ \t]*(\w+):?[ \t]*(\S*)", source, re.M)
    return any(name in flags or (name, value) == ("eval", "false") for name, value in found)


def for_the_page(output: dict) -> bool:
    "Progress bars and warnings go to stderr: they are for the person at the screen."
    return output.get("name") != "stderr" and WIDGET not in output.get("data", {})


def execute(path: Path, flags: list[str]) -> None:
    nb = nbformat.read(path, 4)
    run = nbformat.from_dict(nb)
    for c in run.cells:
        if c.cell_type == "code" and skipped(c.source, flags):
            c.source = ""
    run.cells.insert(0, nbformat.v4.new_code_cell(PREFACE))
    where = dict(metadata=dict(path=str(path.parent)))
    NotebookClient(run, timeout=1200, kernel_name="python3", resources=where).execute()
    for old, new in zip(nb.cells, run.cells[1:]):
        if old.cell_type != "code" or skipped(old.source, flags): continue
        old.outputs = [o for o in new.outputs if for_the_page(o)]
    nbformat.write(nb, path)
    clean = Path(sys.executable).with_name("nbdev_clean")
    subprocess.run([clean, "--fname", str(path)], check=True, cwd=ROOT)


def main(words: list[str]) -> int:
    flags = [f for f in FLAGS if f != "slow" or "--slow" not in words]
    named = [Path(w).resolve() for w in words if not w.startswith("--")]
    paths = named or sorted((ROOT / "nbs").rglob("*.ipynb"))
    failed = []
    for p in (bar := tqdm([p for p in paths if ".ipynb_checkpoints" not in p.parts])):
        bar.set_description(p.name)
        try:
            execute(p, flags)
        except CellExecutionError as e:
            failed.append(p.name)
            print(f"{p}:\n{e}", file=sys.stderr)
    if failed:
        print(f"failed, left as they were: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
