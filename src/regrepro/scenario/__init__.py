"""Scenarios: what a file declares of one (`declaration`), and the files themselves (`library`)."""

from regrepro.scenario.declaration import (
    CONTRACTS,
    KERNEL_NEED,
    NEEDS,
    Change,
    Expectation,
    Instead,
    Scenario,
    ScenarioFileError,
    Size,
    Value,
    change,
    check_options,
    in_words,
    instead,
    needs_by_name,
    scenario,
)
from regrepro.scenario.library import Library, load_file, shipped_directory, shipped_files

__all__ = [
    "CONTRACTS",
    "KERNEL_NEED",
    "NEEDS",
    "Change",
    "Expectation",
    "Instead",
    "Library",
    "Scenario",
    "ScenarioFileError",
    "Size",
    "Value",
    "change",
    "check_options",
    "in_words",
    "instead",
    "load_file",
    "needs_by_name",
    "scenario",
    "shipped_directory",
    "shipped_files",
]
