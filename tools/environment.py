"""The environment in .venv: made once, brought up to date when the files it is made from change.

usage: python tools/environment.py                      make it, or bring it up to date
       python tools/environment.py current              exit status 0 if there is nothing to do
       python tools/environment.py add EXTRA            add an optional extra to it
       python tools/environment.py current EXTRA        exit status 0 if it is there already

TORCH and TORCH_INDEX, from the Makefile, say which build of torch; see torch_build.py.
Runs before anything is installed, so it needs the standard library only.
"""
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch_build

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".installed"      # written last: without it an install was interrupted
PINS = VENV / "constraints.txt"  # constraints.txt with the build of torch that is installed
SOURCES = ("settings.ini", "setup.py", "constraints.txt")


class Stamp(NamedTuple):
    "What an environment was made from."
    folder: str   # scripts in it carry its path: moved or copied, it has to be made anew
    sources: str  # fingerprint of SOURCES
    torch: str    # what TORCH said; a later call that says nothing keeps it


def stamp_file(extra: str = "") -> Path:
    "Where the stamp of the core stands, or that of an optional extra."
    return STAMP.with_name(f"{STAMP.name}-{extra}") if extra else STAMP


def read_stamp(extra: str = "") -> Stamp | None:
    try:
        return Stamp(**json.loads(stamp_file(extra).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_stamp(stamp: Stamp, extra: str = "") -> None:
    final = stamp_file(extra)
    unfinished = final.with_name(final.name + ".part")
    unfinished.write_text(json.dumps(stamp._asdict()), encoding="utf-8")
    os.replace(unfinished, final)


def wanted(old: Stamp | None) -> Stamp:
    contents = b"\0".join((ROOT / name).read_bytes() for name in SOURCES)
    torch = os.environ.get("TORCH", "").strip() or (old.torch if old else "")
    return Stamp(str(ROOT), hashlib.sha256(contents).hexdigest(), torch)


def runs() -> bool:
    "Whether the environment's Python is there; it is a link to one that may have been removed."
    return os.access(PYTHON, os.X_OK)


def pip_install(*args: str) -> bool:
    # These variables reach the isolated build too, which -c does not. pip splits them at spaces,
    # and a URL has none.
    env = dict(os.environ, PIP_CONSTRAINT=PINS.as_uri(), PIP_BUILD_CONSTRAINT=PINS.as_uri())
    pip = [str(PYTHON), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    return subprocess.run([*pip, "install", "--no-user", *args], cwd=ROOT, env=env).returncode == 0


def installed_torch() -> str:
    "Version of the environment's torch with its local tag; empty where there is none."
    code = """from importlib.metadata import distributions
print(*{d.version for d in distributions(name='torch')})"""
    done = subprocess.run([PYTHON, "-I", "-c", code], capture_output=True, text=True)
    return done.stdout.strip()


def pinned_torch() -> str:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    found = re.search(r"^torch==(\S+)$", pins, re.M)
    if found is None: sys.exit("constraints.txt: no line torch==…")
    return found[1]


def write_pins(torch: str) -> None:
    "constraints.txt with this torch, so that the chosen build is not replaced by another one."
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    line = f"torch=={torch}\n" if torch else ""
    PINS.write_text(re.sub(r"^torch==.*\n", line, pins, flags=re.M), encoding="utf-8")


def check_disk(build: torch_build.Build) -> None:
    free = shutil.disk_usage(ROOT).free
    if free >= build.disk: return
    GB = torch_build.GB
    room = f"needed: {build.disk / GB:.0f} GB of disk; {free / GB:.1f} GB are free"
    if free < torch_build.CPU_DISK: sys.exit(room)
    print(f"this may fail; {room}", flush=True)


def try_build(build: torch_build.Build) -> bool:
    print(build.says, flush=True)
    check_disk(build)
    return pip_install(*build.args)


def install_torch(line: str) -> bool:
    "Before what depends on it, so that the build is chosen here and not by the resolver."
    write_pins("")
    version = pinned_torch()
    index = os.environ.get("TORCH_INDEX", "").strip()
    build = torch_build.choose(version, index, line, torch_build.has_nvidia_gpu(), str(PYTHON))
    if try_build(build): return True
    if line or "--index-url" not in build.args: return False
    return try_build(torch_build.from_configured(version, str(PYTHON), f"{index} did not deliver"))


def torch_is_right(stamp: Stamp, old: Stamp | None) -> bool:
    have = installed_torch()
    if stamp.torch: return bool(have) and old is not None and old.torch == stamp.torch
    return have.partition("+")[0] == pinned_torch()


def install(stamp: Stamp, old: Stamp | None) -> bool:
    "Everything, into an environment that has no stamp at this moment."
    if not torch_is_right(stamp, old) and not install_torch(stamp.torch): return False
    write_pins(installed_torch())
    if not pip_install("--use-pep517", "-e", ".[dev]"): return False
    compile_package()
    return True


def compile_package() -> None:
    "pip compiles what it copies, and this package it only links: the first command would pay."
    subprocess.run([PYTHON, "-m", "compileall", "-q", ROOT / "fact_nb"])


def make_venv() -> bool:
    return subprocess.run([sys.executable, "-m", "venv", "--clear", VENV]).returncode == 0


def set_up() -> int:
    old = read_stamp()
    stamp = wanted(old)
    if old == stamp and runs(): return 0
    print("setting up .venv (once; some minutes)", flush=True)
    usable = old is not None and old.folder == stamp.folder and runs()
    STAMP.unlink(missing_ok=True)
    if (usable or make_venv()) and install(stamp, old if usable else None):
        write_stamp(stamp)
        return 0
    print("the set-up failed for the reason above; 'make setup' starts it again", file=sys.stderr)
    return 1


def current(extra: str = "") -> int:
    core, old = read_stamp(), read_stamp(extra)
    return int(old is None or old != wanted(core) or not runs())


def add(extra: str) -> int:
    "An optional extra, into an environment whose core is up to date."
    if current():
        print("the environment itself comes first: run 'make setup'", file=sys.stderr)
        return 1
    if current(extra) == 0: return 0
    print(f"adding the optional extra [{extra}] to .venv (once)", flush=True)
    stamp_file(extra).unlink(missing_ok=True)
    if pip_install("--use-pep517", "-e", f".[{extra}]"):
        write_stamp(wanted(read_stamp()), extra)
        return 0
    print(f"[{extra}] was not added for the reason above; the rest is as it was", file=sys.stderr)
    return 1


def main(words: list[str]) -> int:
    match words:
        case []: return set_up()
        case ["current"]: return current()
        case ["current", extra]: return current(extra)
        case ["add", extra]: return add(extra)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("interrupted; 'make setup' starts it again")
