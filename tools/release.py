"""Build, check and tag a release. Nothing is uploaded.

usage: python tools/release.py [--dry-run]      --dry-run: everything but the tag

The version is that of settings.ini. It needs a dated section in CHANGELOG.md, the same number in
CITATION.cff, and a tree without changes, so that the tag names what was built.
"""
import re
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSIDE = ("fact_nb/__init__.py", "fact_nb/py.typed", "fact_nb/lab/claims.toml",
          "fact_nb/lab/history.toml")


def version() -> str:
    settings = ConfigParser(delimiters=["="])
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    return settings["DEFAULT"]["version"]


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def obstacles(number: str) -> list[str]:
    "What has to be put right before this version can be released."
    found = []
    dated = rf"^## \[{re.escape(number)}\] - \d{{4}}-\d\d-\d\d$"
    if not re.search(dated, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M):
        found.append(f"CHANGELOG.md has no section '## [{number}] - YYYY-MM-DD'")
    cited = re.search(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)
    if cited is None or cited[1] != number:
        found.append(f"CITATION.cff does not name version {number}")
    if git("status", "--porcelain"):
        found.append("there are changes that are not committed")
    if git("tag", "--list", f"v{number}"):
        found.append(f"the tag v{number} exists: raise the version in settings.ini")
    return found


def build() -> Path:
    "The wheel, from the source archive, so that the archive is complete too."
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", "dist"], cwd=ROOT, check=True)
    return next((ROOT / "dist").glob("*.whl"))


def missing(wheel: Path) -> list[str]:
    names = set(zipfile.ZipFile(wheel).namelist())
    return [name for name in INSIDE if name not in names]


def main(dry: bool) -> int:
    number = version()
    found = obstacles(number)
    for line in found:
        print(line, file=sys.stderr)
    if found and not dry: return 1
    lost = missing(build())
    if lost:
        print(f"the wheel lacks {', '.join(lost)}", file=sys.stderr)
        return 1
    if not dry:
        git("tag", "--annotate", f"v{number}", "--message", f"fact_nb {number}")
        print(f"tagged v{number}; publish with: git push origin v{number}, and upload dist/")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main("--dry-run" in sys.argv[1:]))
