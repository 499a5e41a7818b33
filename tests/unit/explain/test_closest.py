"""What no rule knows is not denied: the closest lines are shown, and the exit code says so."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from regrepro import cli
from regrepro.explain.explain import explain
from unit.explain.explaining import LOG

# From public reports of tools that no rule knows; names and numbers are replaced.
SPOKEN = [
    "E0326 14:23:06.5 18039 rdma_transport.cpp:529] Memory region not registered by any active device(s): 0",
    "[ 8123.441225] alloc_contig_range: [1d98400, 1d98600) PFNs busy",
    "RuntimeError: Mooncake memory registration failed.",
    " VMA WARNING: bpool[0x754840]:269:register_memory() Failed registering memory",
]
HEALTHY = [
    "I0511 07:42:35.0 10240 rdma_context.cpp:198] Registered memory 0x2e1cbac200 length 4096",
    "ibv_reg_mr(addr=0x7f, length=4096) success, errors=0",
    "ibv_reg_mr ok after error recovery",
    "cudaHostAlloc error checking enabled",
    "memory registration cache: 12 hits, failures: 0",
    "error handler registered for memory region 3",
    '    raise RuntimeError("memory registration failed.")',
    '        fprintf(stderr, "failed to register memory: %s\\n", strerror(errno));',
    "registered 8 buffers of 4096 bytes on mlx5_0",
    "user registration failed: name is taken",
]


@pytest.mark.parametrize("line", SPOKEN)
def test_what_no_rule_knows_is_shown(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    log.write_text(f"starting up\n{line}\nended\n")
    with pytest.raises(SystemExit) as left:
        cli.main(["explain", str(log)])
    told = " ".join(capsys.readouterr().out.split())
    assert left.value.code == 125
    assert told.startswith("Nothing that I know failed in") and " ".join(line.split()) in told


@pytest.mark.parametrize("line", HEALTHY)
def test_what_went_well_or_is_code_is_not(line: str) -> None:
    result = explain([("log", io.BytesIO(line.encode() + b"\n"))])
    assert not result["closest"] and not result["groups"]


def test_lines_of_one_shape_are_shown_once_and_few_in_all() -> None:
    text = "".join(f"Failed to register the memory {n:#x}: Bad address\n" for n in range(100))
    text += "".join(f"tool{chr(97 + n)}: cannot register the memory region\n" for n in range(20))
    lines = explain([("log", io.BytesIO(text.encode()))])["closest"]
    assert len(lines) == 5 and lines[0]["line"] == 1 and lines[1]["text"].startswith("toola")


def test_what_is_known_is_the_answer() -> None:
    text = f"Failed to register memory 0x7f: Bad address [14]\n{LOG}"
    assert not explain([("log", io.BytesIO(text.encode()))])["closest"]
