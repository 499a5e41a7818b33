"""Records of old and fixed drivers, of io_uring in the place of RDMA, and of needs that were not met."""

from __future__ import annotations

from typing import Any

import record_builder as build
from record_builder import Record


def in_the_lab(record: Record, contract: str, boot: tuple[str, ...] = ("cma=512M",)) -> Record:
    """The same record with the stand-in of a driver as the holder of the scenario's own pin."""
    name = f"standin:{contract}"
    record.header["run"]["cuda"] = name
    record.header["lab"] = {"kernel": "7.3", "boot": list(boot)}
    for event in record.events:
        if event["event"] == "pin" and event["control"] is None:
            event["owner"] = name
            event["kind"] = contract
    return record


BY_IO_URING = {"rxe_reg_user_mr": "io_sqe_buffers_register", "__ib_umem_get_va": "io_pin_pages"}


def by_io_uring(record: Record) -> Record:
    for event in record.events:
        if event["event"] == "register":
            event |= {"verb": "io_uring_register_buffers", "device": "io_uring"}
            for step in (*event["trace"].get("events", ()), *event["trace"].get("tree", ())):
                if step.get("fn") in BY_IO_URING:
                    step["fn"] = BY_IO_URING[step["fn"]]
    return record


def unmet(need: str = "root", name: str = "pin_then_register", **run: Any) -> Record:
    builder = build.Builder()
    builder.header["run"] |= run
    builder.memory_map()
    builder.begin(name)
    builder.event("unmet", need=need, why=f"there is no {need}", how="get it")
    builder.end("unmet")
    return builder.done()


def old() -> Record:
    return in_the_lab(build.reproduced_record(), "pin")


def fixed() -> Record:
    return in_the_lab(build.longterm_record(), "longterm")
