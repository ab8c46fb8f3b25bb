"""The set-up as strangers meet it: odd folders, odd users, every answer of PyTorch's index, pins.

Most tests run the real Makefile and tools/ in a small project of their own. Its requirements are
wheels of a few bytes in a local folder, so that an environment takes seconds and no network.
"""
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from configparser import ConfigParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import torch_build  # noqa: E402

linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="elsewhere there is only one build")
VERSION = "9.9.0"  # of the torch that stands in for the real one
SETTINGS = "[DEFAULT]\nmin_python = 3.11\n"
PYPROJECT = """[build-system]
requires = ["dependency"]
build-backend = "backend"
backend-path = ["."]
"""
# The backend writes down which version of its own requirement the isolated build was given.
BACKEND = '''import zipfile
from importlib.metadata import version
from pathlib import Path

WHEEL = "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
SCRIPTS = "[console_scripts]\\nsmall=small:main\\n"
METADATA = """Metadata-Version: 2.1
Name: small
Version: 1
Provides-Extra: dev
Provides-Extra: integrations
Requires-Dist: dependency
Requires-Dist: torch
Requires-Dist: trainer; extra == "integrations"
"""


def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "small-1-py3-none-any.whl"
    with zipfile.ZipFile(Path(folder) / name, "w") as wheel:
        wheel.writestr("small.py", "def main(): print(%r)" % version("dependency"))
        wheel.writestr("small-1.dist-info/METADATA", METADATA)
        wheel.writestr("small-1.dist-info/WHEEL", WHEEL)
        wheel.writestr("small-1.dist-info/entry_points.txt", SCRIPTS)
        wheel.writestr("small-1.dist-info/RECORD", "")
    return name
'''


def write_wheel(folder, name, version, tag="py3-none-any"):
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", about)
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def cpu_tag():
    "The tag of a wheel for this machine, written as PyTorch does."
    return f"{torch_build.python_tag()}-manylinux_2_17_{os.uname().machine}"


def write_index(folder, version=f"{VERSION}+cpu", deliver=True):
    "A folder that is a package index with torch in it; deliver=False: it lists what it lacks."
    wheel = write_wheel(folder / "torch", "torch", version, cpu_tag())
    link = wheel.name.replace("+", "%2B")
    (folder / "torch" / "index.html").write_text(f'<a href="{link}">{wheel.name}</a>')
    if not deliver:
        wheel.unlink()
    return folder


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    "What pip is configured for: two versions of a requirement, and torch without a local tag."
    folder = tmp_path_factory.mktemp("wheels")
    offers = dict(dependency=("1.0", "2.0"), torch=(VERSION, "8.8.0"), trainer=("1.0", "2.0"))
    for name, offered in offers.items():
        for version in offered:
            write_wheel(folder, name, version)
    return folder


def write_project(folder, settings=SETTINGS):
    (folder / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("environment.py", "torch_build.py"):
        shutil.copy(ROOT / "tools" / name, folder / "tools")
    (folder / "settings.ini").write_text(settings)
    (folder / "setup.py").write_text("")
    (folder / "constraints.txt").write_text(f"dependency==1.0\ntorch=={VERSION}\ntrainer==1.0\n")
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "backend.py").write_text(BACKEND)
    return folder


def environ(wheels, **more):
    "A bare environment: no HOME, no settings of whoever runs the tests."
    bare = dict(PATH="/usr/local/bin:/usr/bin:/bin", PIP_CONFIG_FILE="/dev/null", TORCH_INDEX="")
    # An index without pages: pip finds what the folder of wheels has, and --index-url still works.
    pip = dict(PIP_INDEX_URL=(wheels / "none").as_uri(), PIP_FIND_LINKS=wheels.as_uri())
    return bare | pip | more


def make(folder, env, *args, python=sys.executable, **kw):
    kw |= dict(capture_output=True, text=True, timeout=300)
    return subprocess.run(["make", f"PYTHON={python}", *args], cwd=folder, env=env, **kw)


def versions(folder):
    "What is installed in a project's environment."
    found = next((folder / ".venv" / "lib").glob("python*")) / "site-packages"
    return {d.metadata["Name"]: d.version for d in metadata.distributions(path=[str(found)])}


def says(folder):
    "The output of the script that the set-up installed."
    done = subprocess.run([folder / ".venv" / "bin" / "small"], capture_output=True, text=True)
    return done.stdout.strip() or done.stderr


@linux
def test_folder_with_a_space_is_set_up_updated_and_moved(tmp_path, wheels):
    "umask 077 and no HOME as well: nothing of the set-up depends on either."
    folder = write_project(tmp_path / "a folder, 100% #1")
    index = write_index(tmp_path / "an index")
    env = environ(wheels, TORCH_INDEX=str(index))
    done = make(folder, env, "setup", umask=0o077)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"torch {VERSION}+cpu from {index}: the CPU build, about 200 MB" in done.stdout
    assert versions(folder) | dict(torch=f"{VERSION}+cpu", dependency="1.0") == versions(folder)
    assert says(folder) == "1.0", "the pins did not reach the isolated build"

    again = make(folder, env, "setup")
    assert again.returncode == 0 and again.stdout == ""

    (folder / "constraints.txt").write_text(f"dependency==2.0\ntorch=={VERSION}\n")
    kept = folder / ".venv" / "kept"
    kept.touch()
    updated = make(folder, env, "setup")
    assert updated.returncode == 0 and versions(folder)["dependency"] == "2.0"
    assert kept.exists(), "a changed pin needs no new environment"
    assert "CPU build" not in updated.stdout, "the right torch was there already"

    moved = folder.rename(tmp_path / "moved here")
    assert make(moved, env, "setup").returncode == 0
    assert says(moved) == "2.0" and not (moved / ".venv" / "kept").exists()


@linux
def test_interrupted_then_not_delivered_then_another_torch(tmp_path, wheels):
    folder = write_project(tmp_path / "project")
    kill_setup(folder, environ(wheels))
    stamp, leftover = folder / ".venv" / ".installed", folder / ".venv" / "leftover"
    assert not stamp.exists()
    leftover.touch()

    index = write_index(tmp_path / "index", deliver=False)
    env = environ(wheels, TORCH_INDEX=str(index))
    done = make(folder, env, "setup")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not leftover.exists(), "an interrupted environment is made anew"
    assert f"{index} did not deliver" in done.stdout and versions(folder)["torch"] == VERSION

    done = make(folder, env, "setup", "TORCH=pip3 install torch==8.8.0")
    assert done.returncode == 0 and versions(folder)["torch"] == "8.8.0"
    (folder / "settings.ini").write_text(SETTINGS + "# changed\n")
    done = make(folder, env, "setup")
    assert done.returncode == 0 and versions(folder)["torch"] == "8.8.0", "asked for once, kept"

    done = make(folder, env, "setup", "TORCH=torch==7.7.7")
    assert done.returncode != 0 and "'make setup' starts it again" in done.stderr
    assert not stamp.exists()


def test_the_extra_has_a_stamp_of_its_own(tmp_path, wheels):
    "`make setup` installs the core alone; the extra is added once, and again when a pin changes."
    folder, env = write_project(tmp_path / "project"), environ(wheels)
    early = subprocess.run([sys.executable, "tools/environment.py", "add", "integrations"],
                           cwd=folder, env=env, capture_output=True, text=True)
    assert early.returncode == 1 and "run 'make setup'" in early.stderr
    assert make(folder, env, "setup").returncode == 0 and "trainer" not in versions(folder)

    added = make(folder, env, "extra")
    assert added.returncode == 0, added.stdout + added.stderr
    assert "adding the optional extra [integrations]" in added.stdout
    assert versions(folder)["trainer"] == "1.0", "the pins do not reach the extra"
    assert (folder / ".venv" / ".installed-integrations").exists()
    assert make(folder, env, "extra").stdout == make(folder, env, "setup").stdout == ""

    pins = (folder / "constraints.txt").read_text().replace("trainer==1.0", "trainer==2.0")
    (folder / "constraints.txt").write_text(pins)
    assert make(folder, env, "setup").returncode == 0 and versions(folder)["trainer"] == "1.0"
    assert make(folder, env, "extra").returncode == 0 and versions(folder)["trainer"] == "2.0"

    (folder / "constraints.txt").write_text(pins.replace("trainer==2.0", "trainer==3.0"))
    failed = make(folder, env, "extra")
    assert failed.returncode != 0 and "[integrations] was not added" in failed.stderr
    assert not (folder / ".venv" / ".installed-integrations").exists()
    assert make(folder, env, "setup").stdout == "", "the core does not suffer"


@pytest.mark.parametrize("target, extra", [
    ("reproduce", False), ("lab", False), ("bench", False), ("test", True), ("outputs", True)])
def test_who_needs_the_extra(target, extra):
    "A reader who reproduces the paper does not download trainers."
    command = ["make", "-n", "-o", "setup", target]  # -n alone runs lines that call make again
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("add integrations" in done.stdout) is extra


def kill_setup(folder, env):
    command = ["make", "setup", f"PYTHON={sys.executable}"]
    quiet = dict(stdout=subprocess.DEVNULL, start_new_session=True)
    running = subprocess.Popen(command, cwd=folder, env=env, **quiet)
    wait_for(lambda: (folder / ".venv" / "pyvenv.cfg").exists())
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()


def python_for(user):
    "A Python that another user may start, with venv."
    code = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))"
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            done = subprocess.run([python, "-c", code], user=user, extra_groups=[], env={}, cwd="/")
        except OSError:
            continue
        if done.returncode == 0:
            return python
    return None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_than_root(wheels):
    python = python_for("nobody")
    if python is None:
        pytest.skip("no Python with venv that the user nobody may start")
    with tempfile.TemporaryDirectory() as tmp:
        os.chmod(tmp, 0o755)
        links = Path(shutil.copytree(wheels, f"{tmp}/wheels"))
        links.chmod(0o755)
        folder = write_project(Path(tmp) / "a folder")
        for path in (folder, *folder.rglob("*")):
            shutil.chown(path, "nobody")
        nobody = dict(python=python, user="nobody", extra_groups=[])
        done = make(folder, environ(links, TMPDIR="/tmp"), "setup", **nobody)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (folder / ".venv" / ".installed").owner() == "nobody" and says(folder) == "1.0"


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(.05)


class Handler(BaseHTTPRequestHandler):
    "Serves `folder`, or nothing at all while `release` is not set."
    folder, release = None, threading.Event()

    def do_GET(self):
        if self.folder is None:
            self.release.wait(60)
            return
        path = Path(f"{self.folder}{self.path}".replace("%2B", "+"))
        if path.is_dir():
            path = path / "index.html"
        if not path.exists():
            return self.send_error(404)
        kind = "text/html" if path.suffix == ".html" else "application/zip"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(path.read_bytes())

    def log_message(self, *args): pass


def serve(folder):
    handler = type("Serving", (Handler,), dict(folder=folder, release=threading.Event()))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    handler.release.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def slow_server():
    "An index that takes the question and never answers."
    yield from serve(None)


@pytest.fixture
def index_server(tmp_path):
    yield from serve(write_index(tmp_path / "served"))


@pytest.fixture
def configured(monkeypatch, wheels):
    "This process's pip has the local wheels and nothing else."
    for key, value in environ(wheels).items():
        if key.startswith("PIP_"):
            monkeypatch.setenv(key, value)


def choose(index="", line="", gpu=False):
    return torch_build.choose(VERSION, str(index), line, gpu, sys.executable)


@linux
def test_cpu_index_is_preferred(tmp_path, index_server, configured):
    for index in (write_index(tmp_path / "an index"), index_server):
        build = choose(index)
        assert build.args[-1] == f"torch=={VERSION}+cpu" and "CPU build, about 200 MB" in build.says
        assert "--no-deps" in build.args and build.disk == torch_build.CPU_DISK


@linux
@pytest.mark.parametrize("version, tag", [
    ("9.8.0+cpu", None),
    (f"{VERSION}+cpu", "cp27-cp27mu-manylinux_2_17_x86_64"),
])
def test_cpu_index_without_this_version_or_python(tmp_path, configured, version, tag):
    index = write_index(tmp_path / "index", version)
    page = index / "torch" / "index.html"
    if tag:
        page.write_text(page.read_text().replace(cpu_tag(), tag))
    build = choose(index)
    assert build.args == [f"torch=={VERSION}"]
    assert f"no torch {VERSION} for {torch_build.python_tag()}" in build.says


@linux
def test_cpu_index_that_is_not_there(tmp_path, configured):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        refused = f"http://127.0.0.1:{free.getsockname()[1]}"
    for index in (tmp_path / "nothing", refused, "http://no-such-host.invalid"):
        start = time.monotonic()
        build = choose(index)
        assert time.monotonic() - start < torch_build.PATIENCE + 10
        assert build.args == [f"torch=={VERSION}"]
        assert str(index) in build.says and "2.7 GB" in build.says


@linux
def test_cpu_index_that_does_not_answer(slow_server, configured, monkeypatch):
    monkeypatch.setattr(torch_build, "PATIENCE", 1)
    start = time.monotonic()
    with pytest.raises(torch_build.NoAnswer, match="within 1 s"):
        torch_build.torch_page(slow_server)
    assert 1 <= time.monotonic() - start < 5
    assert choose(slow_server).args == [f"torch=={VERSION}"]


@linux
def test_configured_index_says_which_build_it_has(tmp_path, configured, monkeypatch):
    assert "on a public index the CUDA build, about 2.7 GB" in choose().says
    assert choose().disk == torch_build.CUDA_DISK
    folder = tmp_path / "cpu"
    write_wheel(folder, "torch", f"{VERSION}+cpu", cpu_tag())
    monkeypatch.setenv("PIP_FIND_LINKS", folder.as_uri())
    assert "the CPU build, about 200 MB" in choose().says and choose().disk == torch_build.CPU_DISK


@linux
def test_with_a_gpu_the_cpu_index_is_not_asked(tmp_path, configured):
    build = choose(write_index(tmp_path / "index"), gpu=True)
    assert build.args == [f"torch=={VERSION}"] and "an NVIDIA GPU is here" in build.says


@pytest.mark.parametrize("script, gpu", [
    ("echo 'GPU 0: A100'", True),
    ("echo 'No devices were found'", False),
    ("exit 9", False),
    (None, False),
])
def test_a_gpu_is_one_that_the_driver_lists(tmp_path, monkeypatch, script, gpu):
    if Path("/proc/driver/nvidia/gpus").exists():
        pytest.skip("this machine has one")
    program = tmp_path / "nvidia-smi"
    if script:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    if not script and shutil.which("nvidia-smi"):
        pytest.skip("nvidia-smi stands in /bin")
    assert torch_build.has_nvidia_gpu() is gpu


@pytest.mark.parametrize("start", ["", "pip3 install ", " pip install "])
def test_line_of_the_reader_goes_first(tmp_path, start):
    index = write_index(tmp_path / "index")
    build = choose(index, f"{start}torch==1.2 --index-url 'a b'", gpu=True)
    assert build.args == ["torch==1.2", "--index-url", "a b"]


def test_too_little_disk_is_said_before_anything_is_fetched(monkeypatch, capsys):
    import environment

    def room(free):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: usage)

    cuda = torch_build.Build([], "", torch_build.CUDA_DISK)
    room(10**9)
    with pytest.raises(SystemExit, match="needed: 9 GB of disk; 1.0 GB are free"):
        environment.check_disk(cuda)
    room(5 * 10**9)
    environment.check_disk(cuda)
    assert "this may fail" in capsys.readouterr().out
    room(10**10)
    environment.check_disk(cuda)
    assert capsys.readouterr().out == ""


def settings():
    parser = ConfigParser(delimiters=["="])
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    return parser["DEFAULT"]


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("name", pins())
def test_pin_allows_the_oldest_python_we_name(name):
    "min_python without a patch level is its .0, which is older than the 3.11.2 of Debian 12."
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        pytest.skip("not needed on this Python or system")
    if name != "torch":
        assert found.version == pins()[name], "not the pinned one; run: make setup"
    allowed = SpecifierSet(found.metadata.get("Requires-Python") or "")
    assert allowed.contains(f"{settings()['min_python']}.0")


def test_everything_that_is_installed_is_pinned():
    "torch's own CUDA packages aside: which of them it needs is the build's affair."
    pinned = {canonicalize_name(name) for name in pins()}
    kinds = ("requirements", "dev_requirements", "integrations_requirements")
    todo = [need for kind in kinds for need in settings()[kind].split()]
    seen = set()
    while todo:
        need = Requirement(todo.pop())
        name = canonicalize_name(need.name)
        if name in seen or re.match("nvidia|cuda|triton", name) or not_here(name):
            continue
        seen.add(name)
        todo += needed_by(name, need.extras)
    assert seen - pinned == set()


def not_here(name):
    "A part of the optional extra that nobody added: what it needs cannot be read."
    optional = {canonicalize_name(Requirement(need).name)
                for need in settings()["integrations_requirements"].split()}
    return name in optional and not list(metadata.distributions(name=name))


def needed_by(name, extras):
    "Requirements of an installed package on this Python and system, those of its extras included."
    for text in metadata.requires(name) or []:
        marker = Requirement(text).marker
        if marker is None or any(marker.evaluate(dict(extra=e)) for e in ("", *extras)):
            yield text


def test_pytorch_index_stands_in_two_places():
    url = re.search(r"^TORCH_INDEX \?= (\S+)$", (ROOT / "Makefile").read_text(), re.M)[1]
    host = url.split("/")[2]
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("no git repository")
    names = [name for name in files.stdout.split("\0") if (ROOT / name).is_file()]
    holders = {name for name in names if host.encode() in (ROOT / name).read_bytes()}
    assert holders == {"Makefile", "README.md", "nbs/index.ipynb"}
    assert f"--index-url {url} " in (ROOT / "README.md").read_text()


def test_readme_says_what_the_setup_says():
    readme = (ROOT / "README.md").read_text()
    for size in (torch_build.CPU_SIZE, torch_build.CUDA_SIZE):
        assert size.removeprefix("about ") in readme
    for disk in (torch_build.CPU_DISK, torch_build.CUDA_DISK):
        assert f"{disk // torch_build.GB} GB" in readme[:700]
    assert f"for {torch_build.PATIENCE} seconds at most" in readme
    assert f"torch=={pins()['torch']} --index-url" in readme


def test_lab_starts_also_as_root_and_takes_options(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "log"
    options = f"ARGS=--no-browser --ServerApp.port={port} --ServerApp.port_retries=0"
    command = ["make", "-o", "setup", "lab", f"BIN={Path(sys.executable).parent}", options]
    env = dict(os.environ, HOME=str(tmp_path))
    with log.open("w") as out:
        own = dict(stdout=out, stderr=out, start_new_session=True)
        running = subprocess.Popen(command, cwd=ROOT, env=env, **own)
    try:
        wait_for(lambda: f":{port}/lab" in log.read_text() or running.poll() is not None)
        assert running.poll() is None, log.read_text()
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


@pytest.mark.skipif("FACT_TEST_SETUP" not in os.environ, reason="minutes; set FACT_TEST_SETUP=1")
def test_the_real_thing(tmp_path):
    "A clone in a folder with a space, everything installed from the configured indexes."
    folder = tmp_path / "a clone"
    subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
    done = subprocess.run(["make", "setup"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    fact = [folder / ".venv" / "bin" / "fact", "list"]
    listed = subprocess.run(fact, cwd=folder, env=env, capture_output=True, text=True)
    assert "separation" in listed.stdout, listed.stderr
