"""Which source a kernel was built from, as far as its names tell: kernel.org's, Debian's, or another's.

A vendor ports code back, so that the number in a release says what a kernel has at least, never what it
lacks, and what it has only for code that nobody takes out. A number decides for the two sources that this
project has read, and for no series newer than the newest that it has read. Everything else is to be asked of
the kernel itself: its symbols, its BTF, its behaviour. `/etc/os-release` is of the userland and does not say
which kernel runs.
"""

from __future__ import annotations

import re

NEWEST_READ = (7, 3)

# `uname -r` of Debian's linux-image packages: ABI number or package revision, backport, flavour.
_DEBIAN_RELEASE = re.compile(
    r"\d+\.\d+(?:\.\d+)?(?:-rc\d+)?(?:-\d+(?:\.(?:bpo|deb\d+)\.\d+)?)?(?:\+(?:deb\d+|bpo))?(?:\+\d+)?"
    r"(?:-(?:cloud|rt))?-(?:amd64|arm64|arm64-16k)"
)
# debian/rules of the package puts its own version into UTS_VERSION, which `uname -v` shows. Derivatives that
# keep the word put a revision of their own there (`1:6.6.20-1+rpt1`).
_DEBIAN_VERSION = re.compile(
    r"\bDebian (\d+\.\d+)(?:[.~]\w+)*-\d+(?:[~+](?:exp|bpo|deb)\d+(?:[u+]\d+)*)*(?= \(| *$)"
)
_KERNEL_ORG_RELEASE = re.compile(r"\d+\.\d+(?:\.\d+)?(?:-rc\d+)?")
# scripts/mkcompile_h, init/build-version: "#N [SMP] [PREEMPT…] date"; words beside these are a vendor's.
_KERNEL_ORG_VERSION = re.compile(
    r"#\d+ (?:SMP ?)?(?:PREEMPT\w* ?)*(?:[A-Z][a-z]{2} [A-Z][a-z]{2} +\d+ \d\d:\d\d:\d\d \S+ \d{4}|@\d+)"
)
# Vendors that keep a plain `uname -r`, and say in the banner who built it with what.
_VENDOR_BANNER = re.compile(
    r"(?i)bottlerocket|amazon|chromium|chrome-|talos|photon|flatcar|buildroot|"
    r"openeuler|openanolis|anolis|alibaba|alinux|kylin|tencent|opencloudos|uniontech|oracle"
)
# init/version-timestamp.c: who built it stands in brackets. gVisor, which is no Linux, has none.
_BANNER = re.compile(r"Linux version \S+ \(")


def kernel_series(release: str) -> tuple[int, int] | None:
    """Return (major, minor) of a `uname -r`, None where it has no such form."""
    found = re.match(r"\s*(\d{1,3})\.(\d{1,4})(?!\d)", release)
    return (int(found[1]), int(found[2])) if found else None


def stock_series(release: str, version: str, banner: str) -> tuple[int, int] | None:
    """Return the series of a kernel of kernel.org or Debian that is known here, None for any other kernel.

    `version` is `uname -v`, `banner` is `/proc/version`; "" where it is not known, and then nothing is said.
    Debian signs in `uname -v`. A kernel.org kernel has nothing beside its number in `uname -r`; vendors that
    do the same (Bottlerocket) name themselves in the banner, so that without it a plain release stays
    unknown.
    """
    release, version = release.strip(), version.strip()
    series = kernel_series(release)
    if series is None or series > NEWEST_READ:
        return None
    signed = _DEBIAN_VERSION.search(version)
    if signed and _DEBIAN_RELEASE.fullmatch(release) and signed[1] == f"{series[0]}.{series[1]}":
        return series
    plain = _KERNEL_ORG_RELEASE.fullmatch(release) and _KERNEL_ORG_VERSION.fullmatch(version)
    return series if plain and _BANNER.match(banner.strip()) and not _VENDOR_BANNER.search(banner) else None
