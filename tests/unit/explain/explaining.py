"""Logs of the tests of `explain`, and what is asked of the answers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import yaml
from audit_nodes import Node

from regrepro.audit.audit import audit
from regrepro.audit.places import open_place
from regrepro.explain.explain import explain

CORPUS = Path(__file__).parent / "corpus"
ANSWERS: dict[str, Any] = yaml.safe_load((CORPUS / "answers.yaml").read_text(encoding="utf-8"))


WARN = (
    "gpu{host:02d}:{pid}:9 [0] misc/ibvwrap.cc:213 NCCL WARN Call to ibv_reg_mr_iova2 failed with error "
    "Cannot allocate memory\n"
)


LOG = WARN.format(host=1, pid=7)


def run(log: str | bytes, **options: Any) -> dict[str, Any]:
    data = log.encode() if isinstance(log, str) else log
    return explain([("log", io.BytesIO(data))], **options)


def status(result: dict[str, Any], cause: str, group: int = 0) -> str:
    return next(one["status"] for one in result["groups"][group]["causes"] if one["cause"] == cause)


def audit_of(node: Node, folder: Path) -> dict[str, Any]:
    with open_place(node.write(folder)) as reader:
        return audit(reader)
