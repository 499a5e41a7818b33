"""What each tool says."""

from __future__ import annotations

import pytest

from regrepro.explain import formats, text
from regrepro.explain.explain import NEEDLES
from regrepro.explain.scan import Needles, read
from unit.explain.explaining import ANSWERS, CORPUS


def test_needles_cover_the_rules() -> None:
    """Each fragment of the corpus that has an answer is found by the words that the scan looks for."""
    search = Needles(NEEDLES)
    assert search._scan is not None, "the C core is not built"
    for name, answer in ANSWERS.items():
        if answer["groups"]:
            with (CORPUS / f"{name}.log").open("rb") as file:
                assert list(read(file, search)), name


UNSEEN = {
    "oom-kill": "Out of memory: Killed process 77 (python3) total-vm:9kB",
    "page-allocation": "python3: page allocation failure: order:9, mode:0xdc0(GFP_KERNEL)",
    "iova": "arm-smmu 5000000.iommu: iova space exhausted",
    "bar1": "NVRM: GPU 0000:5e:00.0: out of BAR1 space",
    "cma-alloc": "cma: cma_alloc: reserved: alloc failed, req-size: 512 pages, ret: -12",
}


@pytest.mark.parametrize("kind", UNSEEN)
def test_a_remark(kind: str) -> None:
    found = formats.parse_line(UNSEEN[kind])
    assert isinstance(found, formats.Remark) and found.kind == kind


def test_each_message_is_read_in_a_log_of_the_tests() -> None:
    """A new message is one entry of `MESSAGES` and a line that it is read from."""
    lines = [*UNSEEN.values()]
    for path in sorted(CORPUS.glob("*.log")):
        lines += [text.peel(text.decode(line)) for line in path.read_bytes().splitlines()]
    unread = {entry.pattern for entry in formats.MESSAGES}
    for line in lines:
        first = next((entry for entry in formats.MESSAGES if entry.read(line) is not None), None)
        if first is not None:
            unread.discard(first.pattern)
            found = any(word in line for word in first.words.split("|"))
            assert found or isinstance(first.read(line), formats.Remark), f"{first.words}: {line}"
    assert unread == set()
