"""Resources in use of each RDMA device, asked of the kernel by netlink (what `rdma resource show` prints).

The messages are those of include/uapi/rdma/rdma_netlink.h; no privilege is needed for the summary.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

NETLINK_RDMA = 20
RDMA_NL_NLDEV = 5
RDMA_NLDEV_CMD_RES_GET = 9
NLM_F_REQUEST = 0x1
NLM_F_DUMP = 0x300
NLMSG_ERROR = 2
NLMSG_DONE = 3
ATTR_DEV_NAME = 2
ATTR_RES_SUMMARY = 15
ATTR_RES_SUMMARY_ENTRY = 16
ATTR_RES_SUMMARY_ENTRY_NAME = 17
ATTR_RES_SUMMARY_ENTRY_CURR = 18
TYPE_MASK = 0x3FFF


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Walk netlink attributes: (type, payload)."""
    offset = 0
    while offset + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, offset)
        if length < 4 or offset + length > len(data):
            return
        yield kind & TYPE_MASK, data[offset + 4 : offset + length]
        offset += (length + 3) & ~3


def parse(data: bytes) -> tuple[dict[str, dict[str, int]], bool, int]:
    """Read one datagram: (device → {resource: in use}, whether the dump is done, errno or 0)."""
    found: dict[str, dict[str, int]] = {}
    offset = 0
    while offset + 16 <= len(data):
        length, kind, _, _, _ = struct.unpack_from("=IHHII", data, offset)
        if length < 16 or offset + length > len(data):
            return found, True, 0
        body = data[offset + 16 : offset + length]
        if kind == NLMSG_DONE:
            return found, True, 0
        if kind == NLMSG_ERROR:
            return found, True, -struct.unpack_from("=i", body)[0] if len(body) >= 4 else 5
        name = ""
        counts: dict[str, int] = {}
        for attribute, value in attributes(body):
            if attribute == ATTR_DEV_NAME:
                name = value.rstrip(b"\0").decode("utf-8", "replace")
            elif attribute == ATTR_RES_SUMMARY:
                for entry, entry_value in attributes(value):
                    if entry != ATTR_RES_SUMMARY_ENTRY:
                        continue
                    pair = dict(attributes(entry_value))
                    label = (
                        pair.get(ATTR_RES_SUMMARY_ENTRY_NAME, b"").rstrip(b"\0").decode("utf-8", "replace")
                    )
                    count = pair.get(ATTR_RES_SUMMARY_ENTRY_CURR, b"")
                    if label and len(count) >= 8:
                        counts[label] = struct.unpack_from("=Q", count)[0]
        if name:
            found[name] = counts
        offset += (length + 3) & ~3
    return found, False, 0


def resources() -> tuple[dict[str, dict[str, int]], str]:
    """Return (device → {mr, qp, pd, …: in use}, "") or ({}, why not)."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_RDMA) as link:
            link.settimeout(2)
            link.bind((0, 0))
            kind = (RDMA_NL_NLDEV << 10) + RDMA_NLDEV_CMD_RES_GET
            link.send(struct.pack("=IHHII", 16, kind, NLM_F_REQUEST | NLM_F_DUMP, 1, 0))
            found: dict[str, dict[str, int]] = {}
            while True:
                part, done, error = parse(link.recv(1 << 18))
                found.update(part)
                if error:
                    return {}, os.strerror(error)
                if done:
                    return found, ""
    except OSError as error:
        return {}, f"RDMA netlink: {error.strerror or error}"
