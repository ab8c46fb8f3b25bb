"""Settings at which the claims of the separation experiment would say nothing."""
from pathlib import Path

import pytest

from fact_nb.experiments import separation
from fact_nb.lab.experiment import UsageError, override
from fact_nb.lab.store import Store


@pytest.mark.parametrize("change, message", [
    ("ps=0.5", r"ps must stay below τ²/36 = 1.1e-05, it is 0.5: .*every network meets it; lower ps or raise tau"),
    ("ps=1e-6,1e-4", "it is 0.0001"), ("tau=0.001", "below τ²/36 = 2.8e-08")])
def test_settings_that_any_network_would_pass_are_refused(change, message, tmp_path):
    with pytest.raises(UsageError, match=message): separation.experiment.run("quick", overrides=[change], results=tmp_path, progress=False)
    assert not list(tmp_path.rglob("*.json"))


def test_settings_within_the_bound_are_taken():
    assert override(separation.Config(), ["ps=0.001", "tau=0.5"]).ps == (.001,)


def test_no_verdict_without_rows_to_judge():
    r = Store(Path(__file__).parent.parent / "results").load("separation", "cpu")
    small = r.df.lam <= r.df.p / 9.99
    assert all(j(r) is not None for j in separation.judges.values())
    r.df = r.df[~small].assign(stable_rank=1.)                                # only the collapsed side is left
    for claim in ("sep-agop-shape", "sep-weights-shape"):
        assert separation.judges[claim](r) is None, claim
