"""The runner: one child process for each pass through a scenario (`running`), however it ends (`ending`)."""

from regrepro.runner.environment import Environment
from regrepro.runner.running import Interrupted, Pass, passes, run

__all__ = ["Environment", "Interrupted", "Pass", "passes", "run"]
