"""The lines that probes are made of."""

from __future__ import annotations

from regrepro.kernel import trace_probes


def test_probe_lines() -> None:
    (point,) = [point for point in trace_probes.PROBED if "pin_user_pages_fast" in point.names]
    assert (
        trace_probes.return_probe("g", "e", "pin_user_pages_fast", point, with_arguments=True)
        == "r:g/e pin_user_pages_fast start=$arg1:x64 nr_pages=$arg2:s32 gup_flags=$arg3:x32 ret=$retval:s32"
    )
    assert (
        trace_probes.return_probe("g", "e", "pin_user_pages_fast", point, with_arguments=False)
        == "r:g/e pin_user_pages_fast ret=$retval:s32"
    )
    assert trace_probes.entry_probe("g", "e", "pin_user_pages_fast", point).startswith(
        "p:g/e pin_user_pages_fast "
    )


def test_every_name_stands_once_and_event_names_fit() -> None:
    every = [name for point in trace_probes.PROBED for name in point.names]
    assert len(every) == len(set(every))
    longest = max(len(f"{name}_in_{2**22}") for name in every)
    assert longest < 64  # MAX_EVENT_NAME_LEN, kernel/trace/trace_probe.h
