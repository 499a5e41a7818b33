"""What the driver's host pin asks for, best source first: measured here, read in its source, looked up."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regrepro.audit import driversource
from regrepro.audit.catalogue import OBSERVED, UNKNOWN, Contract, Property, contract, load, look_up
from regrepro.audit.places import run_reader
from regrepro.audit.reader import Reader
from regrepro.audit.sheet import Sheet
from regrepro.audit.subjects.system import stock_of
from regrepro.errors import RegreproError
from regrepro.kernel.release import kernel_series

MAX_RUNS = 50


@dataclass
class Driver:
    """The driver that the audit speaks of, and every answer about its pin, best first.

    `asked` is `installed`, `version` (--driver) or `source` (--driver-source).
    """

    asked: str
    version: str | None
    contracts: list[Contract] = field(default_factory=list)
    peermem: Property | None = None
    source: driversource.DriverSource | None = None

    @property
    def contract(self) -> Contract | None:
        """The best answer: the first that knows, else the first of all.

        Where the source itself was read and is of a shape that is not known, the catalogue's guess by
        release order does not stand in for it.
        """
        if self.asked == "source" and self.contracts:
            return self.contracts[0]
        read = any(one.source.endswith(driversource.MLOCK) for one in self.contracts)
        known = next(
            (
                one
                for one in self.contracts
                if one.contract is not None and not (read and one.how == "inferred")
            ),
            None,
        )
        return known or (self.contracts[0] if self.contracts else None)

    def as_dict(self) -> dict[str, Any]:
        """Return it in the shape of the schema audit-1."""
        best = self.contract
        return {
            "asked": self.asked,
            "version": self.version,
            "contract": best.as_dict() if best else None,
            "contracts": [one.as_dict() for one in self.contracts],
            "peermem": None
            if self.peermem is None
            else {"value": self.peermem.value, "how": self.peermem.how, "why": self.peermem.why},
            "source": self.source.as_dict() if self.source else None,
        }


def resolve(
    reader: Reader,
    sheet: Sheet,
    *,
    version: str | None = None,
    source: Path | None = None,
    headers: Path | None = None,
    arch: str | None = None,
    runs: list[Path] | None = None,
) -> Driver:
    """Find out what the driver asks for: the installed one, or the one that is asked about.

    Raises UsageError for a version or a source that cannot be read.
    """
    arch = arch or sheet.value("system", "arch")
    kernel = kernel_series(sheet.value("system", "kernel", ""))
    has_longterm = _kernel_longterm(reader, sheet, headers, kernel)
    if source is not None:
        tree = driversource.read_driver_source(source)
        driver = Driver("source", version or tree.version, source=tree)
        decided, why = tree.contract(arch, has_longterm[0])
        if decided == "longterm" or has_longterm[0] is False:
            why += f"; kernel: {has_longterm[1]}"
        driver.contracts.append(
            Contract(decided, OBSERVED if decided else UNKNOWN, f"driver source {source}", why)
        )
        if tree.peermem is not None:
            driver.peermem = Property(tree.peermem, OBSERVED, f"read in {source}")
    else:
        asked = "version" if version else "installed"
        driver = Driver(asked, version or sheet.value("nvidia", "version"))
        if asked == "installed" and driver.version is not None:
            measured_one = measured(reader, sheet, driver.version, runs or [])
            if measured_one is not None:
                driver.contracts.append(measured_one)
            if arch is not None:
                own = _own_source(reader, sheet, driver.version, arch, has_longterm)
                if own is not None:
                    driver.contracts.append(own)
    if driver.version is not None:
        try:
            looked_up = contract(driver.version, arch, kernel, stock=stock_of(sheet) is not None)
            if driver.peermem is None:
                driver.peermem = look_up(driver.version, "peermem")
        except RegreproError:
            if version:
                raise
        else:
            driver.contracts.append(looked_up)
    return driver


def _kernel_longterm(
    reader: Reader, sheet: Sheet, headers: Path | None, kernel: tuple[int, int] | None
) -> tuple[bool | None, str]:
    """Answer the driver's build-time test: from headers where they lie, else by the kernel's release."""
    if headers is not None:
        return driversource.kernel_has_longterm(headers)
    release = sheet.value("system", "kernel")
    if reader.live and release:
        found = driversource.kernel_has_longterm(Path(f"/lib/modules/{release}/build"))
        if found[0] is not None:
            return found
    if kernel is None:
        return None, "the kernel is not known"
    since = tuple(load()["kernel"]["foll_longterm_since"])
    if kernel < since and stock_of(sheet) is None:
        return None, f"{release} is no kernel whose number decides: give --kernel-headers"
    return kernel >= since, f"Linux {kernel[0]}.{kernel[1]} by its release (FOLL_LONGTERM since 5.2)"


def _own_source(
    reader: Reader, sheet: Sheet, version: str, arch: str, has_longterm: tuple[bool | None, str]
) -> Contract | None:
    """Read the installed driver's own source, where it lies below /usr/src."""
    for folder in sheet.value("nvidia", "source-folders") or []:
        base = folder.lstrip("/")
        if not base.endswith(f"-{version}"):
            continue
        text = reader.read(f"{base}/{driversource.MLOCK}")
        if text.text is None:
            continue
        kbuild = reader.read(f"{base}/{driversource.KBUILD}")
        tested = None if kbuild.text is None else "foll_longterm_present" in kbuild.text
        tree = driversource.DriverSource(
            base, version, {".": driversource.read_host_pin(text.text, tested)}, None
        )
        decided, why = tree.contract(arch, has_longterm[0])
        return Contract(
            decided, OBSERVED if decided else UNKNOWN, text.source, f"{why}; kernel: {has_longterm[1]}"
        )
    return None


def measured(reader: Reader, sheet: Sheet, version: str, runs: list[Path]) -> Contract | None:
    """Take the contract from a run's verdicts that speak of this driver, by the movement of its pages."""
    stated = reader.known("verdicts")
    if stated.text is not None:
        found = of_verdicts(stated.text, stated.source)
        if found is not None:
            return found
    host, kernel = sheet.value("system", "hostname"), sheet.value("system", "kernel")
    for folder in runs[:MAX_RUNS]:
        try:
            run = run_reader(folder, folder / "record.jsonl")
        except RegreproError:
            continue
        same = (
            run.read("proc/sys/kernel/hostname").value == host
            and run.read("proc/sys/kernel/osrelease").value == kernel
            and version in (run.known("nvidia_driver").value or "")
        )
        verdicts = run.known("verdicts")
        if same and verdicts.text is not None:
            found = of_verdicts(verdicts.text, f"{folder}/verdicts.json")
            if found is not None:
                return found
    return None


def of_verdicts(text: str, source: str) -> Contract | None:
    """Return the contract that a run measured on CUDA's own pins, or None; differing answers are none."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return None
    answers: set[str] = set()
    verdicts = parsed.get("verdicts") if isinstance(parsed, dict) else None
    for verdict in verdicts if isinstance(verdicts, list) else []:
        if not isinstance(verdict, dict) or verdict.get("pin_owner") != "cuda":
            continue
        evidence = verdict.get("evidence")
        item = evidence.get("pin_contract") if isinstance(evidence, dict) else None
        value = item.get("value") if isinstance(item, dict) else None
        for pin in value.values() if isinstance(value, dict) else []:
            if isinstance(pin, dict) and pin.get("contract") in ("plain", "longterm"):
                answers.add(pin["contract"])
    if len(answers) != 1:
        return None
    answer = "longterm" if answers == {"longterm"} else "pin"
    return Contract(answer, "measured", source, "by the movement of the pages that CUDA pinned")


def recent_runs(folder: Path) -> list[Path]:
    """Return the run directories below `folder`, newest first."""
    try:
        runs = [run for run in folder.iterdir() if (run / "record.jsonl").is_file()]
        return sorted(runs, key=lambda run: (run / "record.jsonl").stat().st_mtime, reverse=True)
    except OSError:
        return []
