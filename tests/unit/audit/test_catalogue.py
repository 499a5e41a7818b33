"""The driver catalogue: every release of the public source, per architecture and kernel, and what lies
between.
"""

from __future__ import annotations

import pytest

from regrepro.audit.catalogue import contract, load, look_up, version_key
from regrepro.errors import UsageError

X86, ARM = "x86_64", "aarch64"
NEW = (6, 8)


def releases() -> list[str]:
    return sorted(load()["releases"], key=version_key)


def asks_on_x86(version: str) -> bool:
    """The table of the public record, in its own words: which releases ask for FOLL_LONGTERM on x86."""
    branch, *rest = version_key(version)
    if branch < 535 or branch in (545,):
        return False
    if branch == 535:
        return rest[0] != 43 and version_key(version) >= version_key("535.171.04")
    if branch == 550:
        if rest[0] == 40:
            return rest[1] == 55 or rest[1] >= 59
        return version_key(version) >= version_key("550.67")
    return branch >= 555


def has_persistent_api(version: str) -> bool:
    """The same table, its other column: nvidia-peermem has the persistent API."""
    branch, *rest = version_key(version)
    if branch in (515, 520, 530):
        return False
    if branch == 525:
        if rest[0] == 47:
            return rest[1] >= 22
        return version_key(version) >= version_key("525.105.17")
    return branch >= 535


def test_every_branch_of_the_public_source_is_there() -> None:
    branches = {version_key(version)[0] for version in releases()}
    assert branches == {515, 520, 525, 530, 535, 545, 550, 555, 560, 565, 570, 575, 580, 590, 595}
    assert len(releases()) == 193
    assert releases()[0] == "515.43.04"
    assert releases()[-1] == "595.45.04"


@pytest.mark.parametrize("version", releases())
def test_host_pin_of_each_release(version: str) -> None:
    on_x86 = contract(version, X86, NEW)
    assert on_x86.how == "observed"
    assert on_x86.longterm is asks_on_x86(version)
    on_arm = contract(version, ARM, NEW)
    assert on_arm.longterm is False, "no release asks for it on arm64"
    plain = "get" if version_key(version)[0] < 525 else "pin"
    assert on_arm.contract == plain
    assert on_x86.contract == ("longterm" if asks_on_x86(version) else plain)


@pytest.mark.parametrize("version", releases())
def test_peermem_of_each_release(version: str) -> None:
    found = look_up(version, "peermem")
    assert found.how == "observed"
    assert (found.value != "legacy") is has_persistent_api(version)
    assert (found.value == "persistent") is (version_key(version)[0] >= 560)


def test_the_kernel_it_is_built_for_decides_the_build_time_conditions() -> None:
    assert contract("550.67", X86, (5, 1)).contract == "get"
    assert contract("550.67", X86, (5, 2)).contract == "longterm"
    assert contract("535.104.05", X86, (5, 5)).contract == "get"
    assert contract("535.104.05", X86, (5, 6)).contract == "pin"
    assert contract("550.67", ARM, (5, 5)).contract == "get"


def test_without_an_architecture_it_is_not_known() -> None:
    assert contract("550.67", None, NEW).contract is None
    assert contract("535.104.05", None, NEW).contract == "pin"


@pytest.mark.parametrize(
    ("version", "value"),
    [
        ("535.171.05", "longterm-on-x86"),  # between two that agree
        ("535.161.09", None),  # between two that differ
        ("535.999.01", "longterm-on-x86"),  # later in its branch, whatever the next branch does
        ("550.54.99", None),
        ("550.40.56", "longterm-on-x86"),  # in the early line, by that line's own order
        ("550.40.54", None),
        ("545.99", "pin"),
        ("580.173.02", "longterm-on-x86"),
        ("595.84", "longterm-on-x86"),
        ("700.10", "longterm-on-x86"),  # newer than all
        ("470.57.02", "get"),  # older than all: what came later cannot have been there
        ("540.10", None),  # a branch between two that differ
    ],
)
def test_a_release_that_is_not_in_it_is_placed_and_said_to_be_inferred(
    version: str, value: str | None
) -> None:
    found = look_up(version, "host_pin")
    assert found.value == value
    assert found.how == ("unknown" if value is None else "inferred")
    assert version in found.why


@pytest.mark.parametrize("version", ["", "latest", "535", "535.a.1", "1.2.3.4.5", "535.104.05; rm -rf /"])
def test_what_is_no_version_is_an_error_of_one_line(version: str) -> None:
    with pytest.raises(UsageError) as error:
        look_up(version, "host_pin")
    assert "\n" not in str(error.value)


def test_the_catalogue_names_its_sources() -> None:
    catalogue = load()
    assert {source["what"] for source in catalogue["sources"]} >= {"host_pin", "peermem", "kernel"}
    for properties in catalogue["releases"].values():
        assert properties["host_pin"] in catalogue["host_pin"]
        assert properties["peermem"] in catalogue["peermem"]
