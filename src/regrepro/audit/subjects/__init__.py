"""What the audit looks at: a subject a file, with its facts (`collect`) and what they mean (`findings`).

A new check is a file here, and its line below. Facts are collected in this order, later ones may use earlier.
"""

from __future__ import annotations

from regrepro.audit.catalogue import Contract, Property
from regrepro.audit.finding import SEVERITIES, Exposure, Finding
from regrepro.audit.reader import Reader
from regrepro.audit.sheet import Sheet
from regrepro.audit.subjects import (
    class_a,
    class_b,
    dmabuf,
    kho,
    limits,
    memory,
    nvidia,
    policy,
    rdma,
    reservations,
    system,
    topology,
)

_SUBJECTS = (system, memory, reservations, kho, policy, nvidia, rdma, topology, limits)


def collect(reader: Reader) -> Sheet:
    """Find all facts. What is missing raises nothing: its fact says why it is not known."""
    sheet = Sheet()
    for subject in _SUBJECTS:
        subject.collect(reader, sheet)
    return sheet


def find(
    sheet: Sheet, contract: Contract | None, peermem: Property | None, *, driver: str | None
) -> tuple[list[Finding], list[Exposure]]:
    """Apply all rules. `driver` is the release that the contract speaks of (installed or asked about)."""
    unpinnable = memory.unpinnable(sheet)
    a, b = class_a.exposure(sheet, peermem), class_b.exposure(sheet, contract, unpinnable)
    found = [
        class_b.finding(sheet, b, unpinnable, contract),
        class_a.finding(a),
        *kho.findings(sheet, unpinnable),
        *reservations.findings(sheet, unpinnable),
        *limits.findings(sheet),
        *rdma.findings(sheet),
        *nvidia.findings(sheet),
        *dmabuf.findings(sheet, driver),
    ]
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return found, [a, b]
