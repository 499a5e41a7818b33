"""io_uring's long-term pin of a file: the same refusal as an MR's, and on old kernels io_uring's own."""

from regrepro import Stage, change, scenario


@scenario(
    # Since 6.5 check_vma_flags (mm/gup.c): EFAULT; before, io_pin_pages (io_uring/rsrc.c): EOPNOTSUPP.
    shows="a file may not be pinned for long by io_uring: longterm-refused, not page-fault",
    needs=("root", "io-uring"),
    expects={"pin": {"verdict": "other-failure", "layer": "longterm-refused"}},
    controls={"no-pin": change(pin="none")},
)
def file_pinned_by_io_uring(stage: Stage) -> None:
    """Pin 8 pages of a file for long."""
    buffer = stage.buffer(pages=8, backing="file")
    pin = stage.pin(buffer, "longterm")
    stage.register(buffer, access=("REMOTE_READ",)).deregister()
    pin.release()
