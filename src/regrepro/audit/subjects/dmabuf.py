"""DMA-BUF: whether GPU buffers can be registered without peer memory."""

from __future__ import annotations

from collections.abc import Iterator

from regrepro.audit.finding import Condition, Finding, evidence_of
from regrepro.audit.sheet import Sheet
from regrepro.audit.subjects.system import stock_of

DMABUF_SINCE = (5, 12)
OPEN_SINCE = 515
IB_MODULES = {
    "mlx5_core": "mlx5_ib",
    "bnxt_en": "bnxt_re",
    "ice": "irdma",
    "i40e": "irdma",
    "mlx4_core": "mlx4_ib",
}


def conditions(sheet: Sheet, driver: str | None) -> list[Condition]:
    """The open module, CUDA 11.7, Linux 5.12, the RDMA driver."""
    flavour, symbols = sheet.value("nvidia", "flavour"), sheet.value("system", "symbols")
    branch = int(driver.split(".")[0]) if driver else None
    return [
        Condition(
            "the driver's kernel module is the open one",
            None if flavour is None else flavour == "open",
            f"the flavour is {flavour or 'not known'}",
        ),
        Condition(
            "the driver is of CUDA 11.7 or later (branch 515)",
            None if branch is None else branch >= OPEN_SINCE,
            f"driver {driver}" if driver else "the driver's version is not known",
        ),
        _kernel(sheet, symbols or []),
        _provider(sheet, symbols),
    ]


def _kernel(sheet: Sheet, symbols: list[str]) -> Condition:
    """Whether ib_uverbs registers DMA-BUF: drivers/infiniband/core/umem_dmabuf.c, since 5.12."""
    what = "the kernel registers DMA-BUF for RDMA (Linux 5.12)"
    has = next((symbol for symbol in symbols if "dmabuf" in symbol), None)
    if has is not None:
        return Condition(what, True, f"the kernel has {has}")
    stock, name = stock_of(sheet), sheet.value("system", "kernel")
    if stock is None:
        return Condition(what, None, f"no symbol of kernel {name or '(not known)'} says so")
    return Condition(what, stock >= DMABUF_SINCE, f"kernel {name}")


def _provider(sheet: Sheet, symbols: list[str] | None) -> Condition:
    what = "the RDMA driver takes DMA-BUF"
    devices = sheet.value("rdma", "devices") or []
    drivers = sorted({device["driver"] for device in devices if device["driver"]})
    if symbols is None or not drivers:
        return Condition(what, None, "the kernel's symbols or the driver are not known")
    takes = [symbol for symbol in symbols if "reg_user_mr_dmabuf" in symbol]
    able = [
        name
        for name in drivers
        for module in (IB_MODULES.get(name, name),)
        if any(symbol.endswith(f"[{module}]") or symbol.startswith(f"{module}_") for symbol in takes)
    ]
    if able:
        return Condition(what, True, f"{', '.join(able)} has reg_user_mr_dmabuf()")
    return Condition(what, False, f"{', '.join(drivers)} has no reg_user_mr_dmabuf()")


def findings(sheet: Sheet, driver: str | None) -> Iterator[Finding]:
    """Yield whether GPU buffers can be registered so, where there are an NVIDIA driver and an RDMA device."""
    here = sheet.value("nvidia", "state") in ("loaded", "installed, not loaded")
    if not here or not sheet.value("rdma", "devices"):
        return
    all_of_them = conditions(sheet, driver)
    evidence = evidence_of(all_of_them)
    failing = [one for one in all_of_them if one.holds is False]
    unknown = [one.what for one in all_of_them if one.holds is None]
    if failing:
        yield Finding(
            "dmabuf",
            "warning",
            "GPU buffers cannot be registered by DMA-BUF here",
            f"Not met: {'; '.join(one.what + ' (' + one.reason + ')' for one in failing)}. GPU buffers then "
            "need nvidia-peermem, or are copied through host memory.",
            "use the open kernel module (branch 515 or later), Linux 5.12 or later and an RDMA driver with "
            "DMA-BUF",
            evidence,
        )
    elif unknown:
        yield Finding(
            "dmabuf",
            "unknown",
            "Cannot tell whether GPU buffers can be registered by DMA-BUF",
            f"Not known: {'; '.join(unknown)}. Nothing that is known forbids it.",
            "capture the node with scripts/collect.sh",
            evidence,
        )
    else:
        yield Finding(
            "dmabuf",
            "ok",
            "GPU buffers can be registered by DMA-BUF",
            "All conditions are met. Whether a job does so is its own choice (NCCL_DMABUF_ENABLE, the "
            "network plugin).",
            "",
            evidence,
        )
