"""A checkpoint written on a GPU opens on a machine that has none."""
import re
from pathlib import Path

import pytest
import torch

from fact_nb.files import load_state, save_state

PACKAGE = Path(__file__).resolve().parent.parent / "fact_nb"


@pytest.fixture
def of_a_gpu(tmp_path, monkeypatch):
    "A state file whose tensors say that they lay on a GPU."
    path = tmp_path / "state"
    with monkeypatch.context() as m:
        m.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        save_state(path, dict(W=torch.eye(3), nested=[dict(M=torch.ones(2))]), dict(recipe="a"))
    return path


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so it can be opened as it is")
def test_a_state_of_a_gpu_opens_on_the_host(of_a_gpu):
    with pytest.raises(RuntimeError, match="CUDA"):            # what plain torch.load says
        torch.load(of_a_gpu, weights_only=True)
    state = load_state(of_a_gpu, dict(recipe="a"))
    assert state["W"].device.type == state["nested"][0]["M"].device.type == "cpu"
    assert torch.equal(state["W"], torch.eye(3))


def test_every_checkpoint_is_read_in_one_place():
    "So that none is read without saying where its tensors go."
    calls = {p.relative_to(PACKAGE).as_posix(): re.findall(r"torch\.load\((.*)", p.read_text())
             for p in PACKAGE.rglob("*.py")}
    calls = {name: found for name, found in calls.items() if found}
    assert set(calls) == {"files.py"}
    assert all("map_location=" in call for call in calls["files.py"])
