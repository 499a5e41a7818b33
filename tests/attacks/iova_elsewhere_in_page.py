"""An iova at another place within its page than the address."""

from regrepro import Stage, change, scenario


@scenario(
    shows="address and iova differ within the page: arguments",
    needs=("root", "rdma"),
    expects={"none": {"verdict": "other-failure", "layer": "arguments", "errno": "EINVAL"}},
    controls={"no-pin": change(pin="none")},
)
def iova_elsewhere_in_page(stage: Stage) -> None:
    """Register 8 pages under an iova that is 8 bytes off."""
    buffer = stage.buffer(pages=8)
    stage.register(buffer, iova=buffer.address + 8).deregister()
