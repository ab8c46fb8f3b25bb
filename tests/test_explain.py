"""`help` explains every parameter of the public names."""
import inspect
import pydoc
import subprocess
import sys

import pytest

from fact_nb.machines import kernels
from fact_nb.machines.estimators import RFMClassifier, RFMRegressor
from fact_nb.explain import explain
from fact_nb.networks.report import Report
from fact_nb.networks.measure import measure
from fact_nb.machines.rfm import RFM
from fact_nb.networks.training import Recipe, Training, train
from fact_nb.networks.watch import Watch

KERNELS = [kernels.Laplace, kernels.Gaussian, kernels.ExpPower, kernels.Quadratic, kernels.Polynomial, kernels.Exponential]
NAMES = [measure, train, Recipe, Training, Watch, Report, RFM, RFMClassifier, RFMRegressor, *KERNELS]


def unexplained(obj):
    "Parameters without a meaning below their name in the docstring."
    lines = (obj.__doc__ or "").splitlines()
    for name in inspect.signature(obj).parameters:
        at = [i for i, line in enumerate(lines) if line.lstrip("*").partition(" :")[0] == name]
        if name != "self" and not (at and lines[at[0] + 1].startswith("    ")): yield name


def methods(cls):
    "Public methods that the package documents."
    for name, f in inspect.getmembers(cls, callable):
        if (not name.startswith("_") or name == "__call__") and getattr(f, "__module__", "").startswith("fact_nb") and inspect.isroutine(f) and f.__doc__: yield f


@pytest.mark.parametrize("obj", NAMES, ids=lambda o: o.__name__)
def test_every_parameter_is_explained(obj):
    assert explain(obj) is obj and not list(unexplained(obj))
    if inspect.isclass(obj): assert not {f.__qualname__: names for f in methods(obj) if (names := list(unexplained(f)))}
    once = pydoc.render_doc(obj)
    assert pydoc.render_doc(explain(obj)) == once                             # twice adds nothing


def test_what_help_prints():
    text = pydoc.plain(pydoc.render_doc(explain(measure)))
    assert "    weight_decay : float | Mapping | Optimizer | None, default None\n        λ: one number" in text
    assert "    mode : str, default 'eval'\n" in text and "    Returns\n    -------\n    Report\n" in text


def test_other_libraries_keep_their_docstrings():
    from sklearn.base import ClassifierMixin, RegressorMixin
    before = [c.score.__doc__ for c in (ClassifierMixin, RegressorMixin)]
    for est in (RFMClassifier, RFMRegressor): explain(est)
    assert [c.score.__doc__ for c in (ClassifierMixin, RegressorMixin)] == before


def test_a_module_is_explained_by_its_public_names():
    code = "from fact_nb import kernels; from fact_nb.explain import explain; explain(kernels); print(kernels.ExpPower.__doc__, kernels.kernel_matmul.__doc__)"
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "exponent : float, default 1.0\n    γ" in text and "V : Tensor\n    m × c, or m" in text


def test_without_source_nothing_changes(monkeypatch):
    def bare(x):  # what x is
        "One line."
    monkeypatch.setattr(inspect, "getsource", lambda *_: (_ for _ in ()).throw(OSError("could not get source code")))
    monkeypatch.setattr("fastcore.docments.getsource", inspect.getsource)
    assert explain(bare).__doc__ == "One line."
