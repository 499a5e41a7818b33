"""Which BPF programs follow functions of this kernel, whoever loaded them: by bpf(2), as bpftool does."""

from __future__ import annotations

import ctypes
import os
import struct

NEXT_ID, FD_BY_ID, INFO = (
    11,
    13,
    15,
)  # enum bpf_cmd: BPF_PROG_GET_NEXT_ID, …_GET_FD_BY_ID, BPF_OBJ_GET_INFO_BY_FD
KPROBE, TRACING = 2, 26  # enum bpf_prog_type

_libc = ctypes.CDLL(None, use_errno=True)
_number = {"x86_64": 321, "aarch64": 280}.get(os.uname().machine, -1)


def _bpf(command: int, attributes: ctypes.Array[ctypes.c_char]) -> int:
    return int(_libc.syscall(_number, command, attributes, len(attributes)))


def programs() -> set[int]:
    """Return the ids of all programs of kprobes, uprobes and trampolines."""
    found, last = set(), 0
    while True:
        attributes = ctypes.create_string_buffer(struct.pack("=I124x", last), 128)
        if _bpf(NEXT_ID, attributes):
            return found
        last = struct.unpack_from("=I", attributes, 4)[0]
        fd = _bpf(FD_BY_ID, ctypes.create_string_buffer(struct.pack("=I124x", last), 128))
        if fd < 0:
            continue  # it went away just now
        info = ctypes.create_string_buffer(256)
        told = struct.pack("=IIQ112x", fd, len(info), ctypes.addressof(info))
        if _bpf(INFO, ctypes.create_string_buffer(told, 128)) == 0:
            kind = struct.unpack_from("=I", info)[0]
            if kind in (KPROBE, TRACING):
                found.add(last)
        os.close(fd)
