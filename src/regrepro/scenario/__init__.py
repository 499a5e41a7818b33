"""Scenarios: what a file declares of one (`declaration`), and the files themselves (`library`)."""

from regrepro.scenario.declaration import *  # noqa: F403
from regrepro.scenario.library import *  # noqa: F403
