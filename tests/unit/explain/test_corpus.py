"""Each fragment of the corpus has its right answer: what failed, where, and what it can and cannot be."""

from __future__ import annotations

import io
from typing import Any

import pytest

from regrepro.explain.explain import explain
from unit.explain.explaining import ANSWERS, CORPUS

EXACT = ("errno", "buffer", "layer", "hosts", "ranks", "devices", "lengths", "tools")


def of(group: dict[str, Any], *statuses: str) -> set[str]:
    return {cause["cause"] for cause in group["causes"] if cause["status"] in statuses}


def test_the_corpus_is_large_and_complete() -> None:
    assert len(ANSWERS) >= 60
    assert {path.stem for path in CORPUS.glob("*.log")} == set(ANSWERS)


@pytest.mark.parametrize("use_core", [True, False], ids=["core", "python"])
@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_fragment(name: str, use_core: bool) -> None:
    data = (CORPUS / f"{name}.log").read_bytes()
    result = explain([(name, io.BytesIO(data))], use_core=use_core)
    wanted = ANSWERS[name]
    found = {(group["call"], group["errno"], group["count"]): group for group in result["groups"]}
    assert set(found) == {(one["call"], one["errno"], one.get("count", 1)) for one in wanted["groups"]}
    for one in wanted["groups"]:
        group = found[one["call"], one["errno"], one.get("count", 1)]
        for key in EXACT:
            if key in one:
                assert group[key] == one[key], key
        still = of(group, "decided", "supported", "possible")
        if one.get("layer"):
            assert still == {one["layer"]}
            assert of(group, "decided") == {one["layer"]}
            continue
        assert not of(group, "decided")
        assert set(one.get("can", ())) <= still
        assert set(one.get("cannot", ())) <= of(group, "impossible")
        if "only" in one:
            assert still == set(one["only"])
        if "supported" in one:
            assert set(one["supported"]) == of(group, "supported")
        else:
            assert not of(group, "supported"), "a cause is supported that the text does not speak for"
    kinds = {remark["kind"] for remark in result["remarks"]}
    remarks = set(wanted.get("remarks", ()))
    assert remarks <= kinds and kinds - remarks <= {"device-command"}


def test_all_fragments_in_one_log_are_told_apart() -> None:
    """One after the other in one stream, nothing is lost and nothing is joined that is not the same."""
    data = b"\n\n".join(
        (CORPUS / f"{name}.log").read_bytes() + b"\n" * 20
        for name in sorted(ANSWERS)
        if ANSWERS[name]["groups"] and name.startswith(("nccl", "ucx", "libfabric"))
    )
    wanted = sum(
        one.get("count", 1)
        for name, answer in ANSWERS.items()
        if name.startswith(("nccl", "ucx", "libfabric"))
        for one in answer["groups"]
    )
    result = explain([("all", io.BytesIO(data))])
    assert sum(group["count"] for group in result["groups"]) == wanted
