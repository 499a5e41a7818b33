"""A range that goes beyond the last address."""

from regrepro import Stage, change, scenario


@scenario(
    shows="address and length overflow: arguments",
    needs=("root", "rdma"),
    expects={"none": {"verdict": "other-failure", "layer": "arguments", "errno": "EINVAL"}},
    controls={"no-pin": change(pin="none")},
)
def address_wraps(stage: Stage) -> None:
    """Register 8 pages whose end is no address."""
    buffer = stage.buffer(pages=8)
    start = 2**64 - 4 * stage.page_size
    stage.register(buffer, address=start, length=buffer.length, iova=start).deregister()
