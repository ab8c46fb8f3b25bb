"""What the site serves beside its pages: KaTeX, pinned, into nbs/katex.

usage: python tools/assets.py [FOLDER]      FOLDER: a copy of KaTeX's dist, instead of the net

tools/assets.txt has the SHA-256 of every file. A file that is there and right is not fetched again.
"""
import hashlib
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUMS = ROOT / "tools" / "assets.txt"
TARGET = ROOT / "nbs" / "katex"
HOME = "https://cdn.jsdelivr.net/npm/katex@0.16.22/dist/"


def wanted() -> dict[str, str]:
    "File → SHA-256."
    pairs = (line.split() for line in SUMS.read_text(encoding="utf-8").splitlines())
    return {name: digest for digest, name in pairs}


def is_right(content: bytes, digest: str) -> bool:
    return hashlib.sha256(content).hexdigest() == digest


def read(name: str, folder: str | None) -> bytes:
    "From a folder, or from KaTeX's public home."
    if folder: return Path(folder, name).read_bytes()
    with urllib.request.urlopen(HOME + name, timeout=60) as answer:
        return answer.read()


def fetch(target: Path, folder: str | None = None) -> list[str]:
    "Bring what is missing or wrong; the names of what was brought."
    brought = []
    for name, digest in wanted().items():
        path = target / name
        if path.exists() and is_right(path.read_bytes(), digest): continue
        content = read(name, folder)
        if not is_right(content, digest):
            raise SystemExit(f"{name}: not the file that tools/assets.txt names; nothing was kept")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        brought.append(name)
    return brought


def main(words: list[str]) -> int:
    try:
        fetch(TARGET, words[0] if words else None)
    except OSError as e:
        print(f"KaTeX could not be fetched ({e}): run 'python tools/assets.py FOLDER' with a copy "
              f"of its dist folder, version {HOME.split('@')[1].split('/')[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
