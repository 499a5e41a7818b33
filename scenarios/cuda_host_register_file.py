"""A file that CUDA pins: what the fixed driver must refuse by itself."""

from regrepro import Stage, change, scenario


@scenario(
    shows="section 9: registration of pre-existing file-backed memory; a long-term pin of it is refused",
    needs=("root", "registrar", "cuda"),
    expects={
        "pin": {
            "kernel>=6.5": {"verdict": "other-failure", "layer": ["longterm-refused", "unknown"]},
            "kernel<6.5": "not-reproduced",
        },
        "longterm": {"verdict": "other-failure", "layer": "cuda-pin"},
    },
    controls={"of-a-memfd": change(fault="none")},
    profiles=("node",),
    timeout=180,
    options={"pages": 8},
)
def cuda_host_register_file(stage: Stage) -> None:
    """Pin a writable mapping of a file by cudaHostRegister, then register it."""
    # Where Linux lets anything be pinned: of the file, not of the place of its pages, is what happens.
    buffer = stage.faults.buffer_of_file(pages=stage.option("pages"), place="ordinary")
    pin = stage.pin(buffer)
    if pin.errno:
        return  # CUDA itself refused, as a driver must that pins for long
    stage.cuda.describe(buffer)
    stage.register(buffer).deregister()
    pin.release()
