"""pyverbs, where the distribution has it."""

from __future__ import annotations

import pytest

from regrepro.core import pyverbs_device
from regrepro.errors import EnvironmentProblem


def test_pyverbs_says_what_it_lacks() -> None:
    missing = pyverbs_device.available()
    if missing:
        assert "python3-pyverbs" in missing
        with pytest.raises(EnvironmentProblem, match="python3-pyverbs"):
            pyverbs_device.devices()
        return
    assert isinstance(pyverbs_device.devices(), list)
    with pytest.raises(EnvironmentProblem, match="no RDMA device 'no-such'"):
        pyverbs_device.PyverbsDevice("no-such")
