"""Do the pins resolve, from wheels alone, on every Python that we name? Wants uv and a network.

usage: python tools/resolve.py [VERSION …]      to be run after a change of constraints.txt
"""
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11.0", "3.11.2", "3.12", "3.13", "3.14")  # Debian 12 has 3.11.2
SYSTEMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28")


def requirements() -> list[str]:
    "Those of the package and of all its extras."
    parser = ConfigParser(delimiters=["="])
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    cfg = parser["DEFAULT"]
    return [word for key in cfg if key.endswith("requirements") for word in cfg[key].split()]


def resolves(python: str, system: str) -> bool:
    command = ["uv", "pip", "compile", "--quiet", "--only-binary", ":all:", "-c", "constraints.txt"]
    command += ["--python-version", python, "--python-platform", system, "-"]
    wanted = "\n".join([*requirements(), "setuptools"])
    done = subprocess.run(command, cwd=ROOT, input=wanted, capture_output=True, text=True)
    print(f"Python {python} on {system}: {done.stderr.strip() or 'resolves'}", flush=True)
    return done.returncode == 0


def main(pythons: list[str]) -> int:
    done = [resolves(python, system) for python in pythons for system in SYSTEMS]
    return int(not all(done))


if __name__ == "__main__": sys.exit(main(sys.argv[1:] or list(PYTHONS)))
