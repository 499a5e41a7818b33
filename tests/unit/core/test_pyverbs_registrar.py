"""pyverbs, where the distribution has it."""

from __future__ import annotations

import pytest

from regrepro.core import pyverbs_registrar
from regrepro.errors import EnvironmentProblem


def test_pyverbs_says_what_it_lacks() -> None:
    missing = pyverbs_registrar.available()
    if missing:
        assert "python3-pyverbs" in missing
        with pytest.raises(EnvironmentProblem, match="python3-pyverbs"):
            pyverbs_registrar.devices()
        return
    assert isinstance(pyverbs_registrar.devices(), list)
    with pytest.raises(EnvironmentProblem, match="no RDMA device 'no-such'"):
        pyverbs_registrar.PyverbsRegistrar("no-such")
