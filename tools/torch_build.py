"""Which build of torch the set-up installs: the CPU build where there is no NVIDIA GPU.

The public package index holds the CUDA build for Linux, 2.7 GB of downloads, and pinning the
version does not prevent it. PyTorch's own index holds the CPU build of the same version. It is
asked first, and only for seconds: where it cannot be reached, or has no build for this Python,
torch comes from the index that pip is configured for.

Runs before anything is installed, so it needs the standard library only.
"""
import http.client
import platform
import re
import shlex
import shutil
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

PATIENCE = 5  # seconds that the index may take to answer, name resolution included
GB = 10**9
CPU_SIZE, CUDA_SIZE = "about 200 MB", "about 2.7 GB"
CPU_DISK, CUDA_DISK = 3 * GB, 9 * GB


class Build(NamedTuple):
    args: list[str]  # what `pip install` is called with
    says: str        # which build, from where, and how large
    disk: int        # bytes that the whole set-up takes, pip's cache included


class NoAnswer(Exception):
    "The index could not be read, or not in time, or does not have the build."


def python_tag() -> str:
    "This Python and its binary interface, as wheels spell them."
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"{tag}-{tag}{sys.abiflags}"


def has_nvidia_gpu() -> bool:
    "Whether the driver lists a GPU. The program alone proves nothing: some containers have it."
    if any(Path("/proc/driver/nvidia/gpus").glob("*")): return True
    program = shutil.which("nvidia-smi")
    if program is None: return False
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "GPU" in done.stdout


def as_url(index: str) -> str:
    "A folder stands for an index too."
    return index.rstrip("/") if "://" in index else Path(index).resolve().as_uri()


def torch_page(index: str) -> str:
    "The page of an index that lists its torch wheels."
    url = f"{as_url(index)}/torch/"
    if url.startswith("file:"): url += "index.html"
    outcome: list[str | Exception] = [NoAnswer(f"no answer within {PATIENCE} s")]

    def read() -> None:
        try:
            with urllib.request.urlopen(url, timeout=2 * PATIENCE) as page:
                outcome[0] = page.read().decode()
        except (OSError, ValueError, http.client.HTTPException) as error:
            outcome[0] = NoAnswer(str(getattr(error, "reason", error)))

    # A thread, since urlopen's timeout covers neither name resolution nor a page that trickles in.
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(PATIENCE)
    answer = outcome[0]
    if isinstance(answer, Exception): raise answer
    return answer


def cpu_version(page: str, version: str) -> str | None:
    "The CPU build of this version for this Python and machine, with its local tag."
    build = rf"({re.escape(version)}(?:\+cpu)?)"
    wheel = rf"torch-{build}-{python_tag()}-[^/]*linux[^/]*_{platform.machine()}\.whl"
    return max(re.findall(wheel, unquote(page)), default=None)


def configured_version(version: str, python: str) -> str | None:
    "What pip's own index has of this version, with its local tag; None where pip cannot say."
    command = [python, "-m", "pip", "index", "versions", "torch", "--only-binary", ":all:"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return None
    found = re.findall(rf"(?<= ){re.escape(version)}(?:\+\w+)?(?=,|$)", done.stdout, re.M)
    return found[0] if found else None  # pip lists the one that it prefers first


def from_configured(version: str, python: str, why: str) -> Build:
    "What pip installs by itself, said as exactly as pip knows it."
    args = [f"torch=={version}"]
    found = configured_version(version, python) or version
    says = f"torch {found} from the package index that pip is configured for ({why})"
    if not sys.platform.startswith("linux"):
        return Build(args, f"{says}: less than 200 MB", CPU_DISK)
    if found.endswith("+cpu"):
        return Build(args, f"{says}: the CPU build, {CPU_SIZE}", CPU_DISK)
    return Build(args, f"{says}: on a public index the CUDA build, {CUDA_SIZE}", CUDA_DISK)


def from_line(line: str) -> Build:
    "What the reader asked for: a requirement with options, or all of the line of pytorch.org."
    words = shlex.split(re.sub(r"^\s*(?:\S*pip3?\s+install\s+)?", "", line))
    return Build(words, f"torch as asked for: {shlex.join(words)}", CPU_DISK)


def from_cpu_index(version: str, index: str) -> Build:
    "The CPU build of PyTorch's own index; NoAnswer where it has none for this machine."
    found = cpu_version(torch_page(index), version)
    if found is None:
        raise NoAnswer(f"no torch {version} for {python_tag()} on {platform.machine()}")
    # Dependencies come later, at their pinned versions, which this index need not have.
    args = ["--no-deps", "--timeout", "15", "--retries", "1"]
    args += ["--index-url", as_url(index), f"torch=={found}"]
    return Build(args, f"torch {found} from {index}: the CPU build, {CPU_SIZE}", CPU_DISK)


def choose(
    version: str,  # the pinned one
    index: str,    # PyTorch's CPU index, or a folder in its place; empty: not asked
    line: str,     # what the reader asks for; goes before everything else
    gpu: bool,     # is there an NVIDIA GPU?
    python: str,   # the environment's Python, which knows pip's configuration
) -> Build:
    "The build for this machine."
    if line: return from_line(line)
    if not sys.platform.startswith("linux"):
        return from_configured(version, python, "the one for this system")
    if gpu: return from_configured(version, python, "an NVIDIA GPU is here")
    if not index: return from_configured(version, python, "no other index was named")
    try:
        return from_cpu_index(version, index)
    except NoAnswer as reason:
        return from_configured(version, python, f"{index}: {reason}")
