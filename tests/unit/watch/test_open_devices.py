"""Which RDMA devices processes have open."""

from __future__ import annotations

from pathlib import Path

from regrepro.watch.open_devices import devices_are_gone


def test_a_device_is_gone_when_its_file_or_the_kernels_own_account_is(tmp_path: Path) -> None:
    descriptors, sysfs = tmp_path / "6" / "fd", tmp_path / "sys"
    descriptors.mkdir(parents=True)
    (sysfs / "uverbs0").mkdir(parents=True)
    assert not devices_are_gone(6, tmp_path, sysfs) and not devices_are_gone(7, tmp_path, sysfs)
    (descriptors / "1").symlink_to("/dev/null")
    (descriptors / "3").symlink_to("/dev/infiniband/uverbs0 (deleted)")
    assert devices_are_gone(6, tmp_path, sysfs)
    (descriptors / "4").symlink_to("/dev/infiniband/uverbs1")
    assert devices_are_gone(6, tmp_path, sysfs)
    (descriptors / "5").symlink_to("/dev/infiniband/uverbs0")
    assert not devices_are_gone(6, tmp_path, sysfs)
