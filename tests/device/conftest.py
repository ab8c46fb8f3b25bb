"""One device for all tests here: the simulated one, or the one that `--device` names."""
import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--device", default="simulated", metavar="simulated|cuda|mps|cpu",
                     help="where the device tests compute (default: a simulated device)")
    parser.addoption("--slow", action="store_true", help="every quick unit of every experiment too")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: minutes; runs with --slow")
    config.addinivalue_line("markers", "hardware: what only a real device shows")
    config.addinivalue_line("markers", "simulated: what only the simulated device can count")


def named(name):
    "The device of this name, as a tensor on it says."
    return torch.empty(0, device=name).device


def pytest_collection_modifyitems(config, items):
    simulated, host = (config.getoption("--device") == kind for kind in ("simulated", "cpu"))
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: give --slow"))
        if item.get_closest_marker("hardware") and (simulated or host):
            item.add_marker(pytest.mark.skip(reason="needs a real device: give --device cuda"))
        if item.get_closest_marker("simulated") and not simulated:
            item.add_marker(pytest.mark.skip(reason="counted on the simulated device only"))


@pytest.fixture
def device(request):
    "The device under test; float64 works on it."
    name = request.config.getoption("--device")
    if name != "simulated":
        yield named(name)
        return
    import simulated
    with simulated.Present():
        simulated.forget()
        yield simulated.DEVICE


@pytest.fixture
def narrow(request):
    "A device without float64."
    name = request.config.getoption("--device")
    if name not in ("mps", "simulated"): pytest.skip(f"{name} has float64")
    if name == "mps":
        yield named(name)
        return
    import simulated
    with simulated.Present(float64=False):
        simulated.forget()
        yield simulated.DEVICE
