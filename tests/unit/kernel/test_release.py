"""Which kernels a number decides for, by the names that a kernel gives itself."""

from __future__ import annotations

import pytest
from audit_nodes import VENDOR_RELEASES

from regrepro.kernel.release import kernel_series, stock_series

BANNER = "Linux version 0 (builder@host) (gcc (Debian 12.2.0-14) 12.2.0) #1 SMP"
DATED = "#1 SMP PREEMPT_DYNAMIC Thu Nov 30 10:11:12 UTC 2023"


@pytest.mark.parametrize(
    ("release", "version", "series"),
    [
        ("5.10.0-46-amd64", "#1 SMP Debian 5.10.257-1 (2026-08-02)", (5, 10)),
        ("4.19.0-27-amd64", "#1 SMP Debian 4.19.316-1 (2024-06-25)", (4, 19)),
        ("6.1.0-57-cloud-amd64", "#1 SMP PREEMPT_DYNAMIC Debian 6.1.192-1 (2026-09-30)", (6, 1)),
        ("6.1.0-13-rt-amd64", "#1 SMP PREEMPT_RT Debian 6.1.55-1 (2023-09-29)", (6, 1)),
        ("6.1.0-0.deb11.21-amd64", "#1 SMP PREEMPT_DYNAMIC Debian 6.1.90-1~bpo11+1 (2024-05-06)", (6, 1)),
        ("6.12.118+deb13-amd64", "#1 SMP PREEMPT_DYNAMIC Debian 6.12.118-1 (2026-09-12)", (6, 12)),
        ("6.12.12+bpo-amd64", "#1 SMP PREEMPT_DYNAMIC Debian 6.12.12-1~bpo12+1 (2025-02-23)", (6, 12)),
        ("7.3.4-arm64-16k", "#1 SMP Debian 7.3.4-1~exp1 (2026-11-01)", (7, 3)),
        ("7.3.4+deb14+1-amd64", "#1 SMP PREEMPT_DYNAMIC Debian 7.3.4-1 (2026-11-01)", (7, 3)),
        ("6.11-rc7-amd64", "#1 SMP Debian 6.11~rc7-1~exp1 (2024-09-08)", (6, 11)),
        ("6.18.0", DATED, (6, 18)),
        ("6.18.0-rc3", "#12 SMP PREEMPT Thu Nov  3 10:11:12 CET 2025", (6, 18)),
        # Newer than what was read; signed by Debian's words but not Debian's.
        ("8.0.1", DATED, None),
        ("6.6.20+rpt-rpi-v8", "#1 SMP PREEMPT Debian 1:6.6.20-1+rpt1 (2024-03-07)", None),
        ("6.6.9-amd64", "#1 SMP PREEMPT_DYNAMIC Kali 6.6.9-1kali1 (2024-01-08)", None),
        ("5.10.0-46-amd64", "#45 SMP", None),
        ("5.15.0-1-amd64", "#1 SMP Debian 5.10.257-1 (2026-08-02)", None),
        ("6.18.0", "#1 SMP PREEMPT_DYNAMIC VENDOR Thu Nov 30 10:11:12 UTC 2023", None),
        ("", "", None),
    ],
)
def test_debian_and_kernel_org_are_known_by_their_names(
    release: str, version: str, series: tuple[int, int] | None
) -> None:
    assert stock_series(release, version, BANNER) == series


def test_a_plain_release_is_kernel_orgs_only_if_the_banner_names_no_vendor() -> None:
    built_by = "(builder@buildkitsandbox) (x86_64-bottlerocket-linux-gnu-gcc (Buildroot) 11.3)"
    bottlerocket = f"Linux version 5.10.184 {built_by} #1 SMP"
    assert stock_series("5.10.184", DATED, "") is None
    assert stock_series("5.10.184", DATED, bottlerocket) is None
    assert stock_series("5.10.184", DATED, BANNER) == (5, 10)
    # A vendor's source tree, built there by hand, has no word of its own but the compiler's.
    for compiler in (
        "gcc_old (GCC) 10.3.1 20210422 (openEuler",
        "gcc (GCC) 8.5.0 (Anolis 8.5.0-10",
        "(Kylin 7.3",
    ):
        assert stock_series("5.10.0", DATED, f"Linux version 5.10.0 (root@host) ({compiler}) #1") is None
    # gVisor's answer to uname and /proc/version.
    sentry = "#1 SMP Sun Jan 10 15:06:54 PST 2016"
    assert stock_series("4.4.0", sentry, f"Linux version 4.4.0 {sentry}") is None


@pytest.mark.parametrize("release", VENDOR_RELEASES)
@pytest.mark.parametrize("version", [DATED, "#45-Ubuntu SMP", "#1 SMP PREEMPT_DYNAMIC PMX 6.2.16-20", ""])
def test_no_vendors_kernel_is_taken_for_one_of_these(release: str, version: str) -> None:
    assert stock_series(release, version, BANNER) is None
    assert kernel_series(release) is not None
