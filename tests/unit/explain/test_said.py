"""Facts of the node beside a failure."""

from __future__ import annotations

import pytest

from unit.explain.explaining import LOG, run, status

UNLIMITED = "Max locked memory         unlimited            unlimited            bytes\n"
SMALL = "Max locked memory         8388608              8388608              bytes\n"
ULIMIT = "max locked memory           (kbytes, -l) {}\n"
KHO = "CmaTotal:          32768 kB\nCmaFree:         9719808 kB\n"
DRIFT = "CmaTotal:          32768 kB\nCmaFree:           32832 kB\n"
MUCH = "CmaTotal:        2097152 kB\nCmaFree:         1835008 kB\n"


@pytest.mark.parametrize(
    ("facts", "cause", "wanted"),
    [
        ("", "memlock-accounting", "possible"),
        (UNLIMITED, "memlock-accounting", "impossible"),
        (ULIMIT.format("unlimited"), "memlock-accounting", "impossible"),
        (SMALL, "memlock-accounting", "supported"),
        (SMALL + UNLIMITED, "memlock-accounting", "supported"),
        (ULIMIT.format(8192), "memlock-accounting", "supported"),
        ("", "page-migration", "possible"),
        (KHO, "page-migration", "supported"),
        (DRIFT, "page-migration", "possible"),
        (MUCH, "page-migration", "supported"),
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_facts_beside_the_failure_count(facts: str, cause: str, wanted: str, before: bool) -> None:
    result = run(facts + LOG if before else LOG + facts)
    assert status(result, cause) == wanted


def test_the_reason_says_what_to_do() -> None:
    (group,) = run(LOG + KHO)["groups"]
    first = group["causes"][0]
    assert first["cause"] == "page-migration" and "kho=off" in first["why"] and "9.3 GiB" in first["why"]
