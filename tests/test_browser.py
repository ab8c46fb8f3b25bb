"""What a reader sees: the report and a notebook in JupyterLab, in a real browser. Skipped, and said so, where there is no Chromium."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from browser import CHROMIUM, Browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: the report and JupyterLab were not looked at in a browser")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    "The report of the committed results."
    path = tmp_path_factory.mktemp("report") / "index.html"
    code = f"from fact_nb.lab.report import write_report; write_report({str(path)!r}, results={str(path.parent)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=600)
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "desktop"])
def test_report(report, width, dark):
    with Browser() as b:
        b.look(width, dark)
        b.open(report.as_uri())
        assert b.run("Promise.all([...document.images].map(i => i.decode())).then(() => document.images.length)") > 10
        assert b.errors == []
        assert b.run("document.documentElement.scrollWidth <= window.innerWidth"), "it scrolls sideways"
        assert b.run("[...document.images].filter(i => i.alt.trim().length < 20).length") == 0
        assert b.run("[...document.images].filter(i => i.naturalWidth == 0).length") == 0
        assert b.run("document.querySelectorAll('tr[id]').length") >= 74
        shade = b.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number).reduce((a, c) => a + c)")
        assert (shade < 150) == dark, "the page follows the reader's theme"


def test_the_browser_sees_what_is_wrong(tmp_path):
    "The checks above can fail."
    bad = tmp_path / "bad.html"
    bad.write_text("<body style='width:3000px'><img src='nothing.png'><script>console.error('boom'); undefined_function()</script></body>")
    with Browser() as b:
        b.look(390, False)
        b.open(bad.as_uri())
        b.run("0")
        assert any("boom" in e for e in b.errors) and any("undefined_function" in e for e in b.errors) and any("nothing.png" in e for e in b.errors)
        assert not b.run("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.fixture
def lab(tmp_path):
    "A running JupyterLab over a copy of the notebooks; its address."
    shutil.copytree(ROOT / "nbs", tmp_path / "nbs", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    home = {f"JUPYTER_{k}_DIR": str(tmp_path / k.lower()) for k in ("CONFIG", "DATA", "RUNTIME")}
    # port 0: the system picks a free one; expose_app_in_browser: the page can be told to run a command
    server = subprocess.Popen([sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0", "--IdentityProvider.token=", "--ServerApp.password=",
                               f"--ServerApp.root_dir={tmp_path / 'nbs'}", "--LabApp.expose_app_in_browser=True", "--LabApp.extension_manager=readonly", "--LabApp.news_url=", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"],
                              env=dict(os.environ, OMP_NUM_THREADS="1", **home), stdout=(tmp_path / "log").open("w"), stderr=subprocess.STDOUT)
    try: yield Browser.wait(None, lambda: next((json.loads(p.read_text())["url"] for p in (tmp_path / "runtime").glob("jpserver-*.json")), None), 90), tmp_path / "nbs"
    finally:
        server.terminate()
        try: server.wait(20)
        except subprocess.TimeoutExpired: server.kill()


def test_a_notebook_runs_in_jupyterlab(lab):
    url, nbs = lab
    with Browser() as b:
        b.look(1280, False)
        b.open(f"{url}lab/tree/index.ipynb?reset")
        b.run("window.page = () => window.jupyterapp && [...jupyterapp.shell.widgets('main')].find(w => w.sessionContext && w.sessionContext.session), 0")
        b.wait(lambda: b.run("!!page()"), 120)
        b.run("jupyterapp.shell.activateById(page().id), page().sessionContext.ready.then(() => 1)")
        assert b.run("jupyterapp.commands.execute('notebook:run-all-cells').then(() => true)")
        b.run("page().context.save().then(() => true)")
        cells = [c for c in json.loads((nbs / "index.ipynb").read_text())["cells"] if c["cell_type"] == "code"]
        assert len(cells) >= 4 and all(c["execution_count"] for c in cells), "every cell was run"
        assert not [o for c in cells for o in c["outputs"] if o["output_type"] == "error"]
