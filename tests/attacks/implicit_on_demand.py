"""Implicit on-demand paging: the whole address space, which this device does not do. It is no overflow."""

from regrepro import Stage, change, scenario


@scenario(
    shows="address 0, all lengths, ON_DEMAND: the device says no: arguments",
    needs=("root", "rdma"),
    expects={"none": {"verdict": "other-failure", "layer": "arguments"}},
    controls={"no-pin": change(pin="none")},
)
def implicit_on_demand(stage: Stage) -> None:
    """Register everything on demand."""
    stage.faults.only_on("rdma_rxe", "it may have implicit on-demand paging")
    buffer = stage.buffer(pages=8)
    access = ("LOCAL_WRITE", "ON_DEMAND")
    stage.register(buffer, "ibv_reg_mr", access=access, address=0, length=2**64 - 1, iova=0).deregister()
