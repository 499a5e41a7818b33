"""The command line of `explain`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from audit_nodes import Node
from click.testing import CliRunner

from regrepro.explain.commands import explain as command
from unit.explain.explaining import LOG, audit_of, status


def test_command_line(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(LOG, encoding="utf-8")
    packed = tmp_path / "job.log.gz"
    packed.write_bytes(gzip.compress(LOG.encode()))
    shown = CliRunner().invoke(command, [str(log), str(packed)])
    assert shown.exit_code == 0
    assert "ibv_reg_mr_iova2 failed with ENOMEM, 2 times" in shown.output
    piped = CliRunner().invoke(command, ["--json"], input=LOG)
    assert json.loads(piped.output)["groups"][0]["errno"] == "ENOMEM"
    nothing = CliRunner().invoke(command, ["-"], input="all is well\n")
    assert nothing.exit_code == 0
    assert nothing.output == "No failed memory registration in standard input.\n"


def test_command_line_errors_are_one_line(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(LOG, encoding="utf-8")
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(LOG.encode() * 1000)[:15])
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}", encoding="utf-8")
    for arguments in (["/nonexistent"], [str(tmp_path)], [str(cut)], ["--audit", str(wrong), str(log)],
                      ["--audit", str(log), str(log)], ["--audit", "/nonexistent", str(log)]):  # fmt: skip
        shown = CliRunner().invoke(command, arguments)
        assert shown.exit_code == 2, arguments
        assert shown.output.count("\n") == 1, shown.output
        assert shown.output.startswith("regrepro explain: ")


def test_command_takes_an_audit(tmp_path: Path) -> None:
    value = tmp_path / "audit.json"
    value.write_text(json.dumps(audit_of(Node().driver("535.104.05"), tmp_path / "node")), encoding="utf-8")
    shown = CliRunner().invoke(command, ["--audit", str(value), "--json", "-"], input=LOG)
    assert status(json.loads(shown.output), "page-migration") == "impossible"
