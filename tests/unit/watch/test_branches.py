"""Where a function has failed: what is answered of compiled functions is held against running them."""

from __future__ import annotations

import functools
import platform
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrepro.watch.branches import Branch, Place, Undecided, failing_branches
from regrepro.watch.elf import dynamic_functions
from regrepro.watch.flow.graph import follow
from regrepro.watch.flow.machine import End

C_TESTS = Path(__file__).parents[2] / "c"
MACHINE = platform.machine()
PARAMETERS = {"pd": 8, "addr": 8, "length": 8, "iova": 8, "access": 4}
LEVELS = ["-O0", "-O1", "-O2", "-O3", "-Os"]
GUARDED = "-mbranch-protection=standard" if MACHINE == "aarch64" else "-fcf-protection"
FLAGS = [
    *LEVELS,
    f"-O2 {GUARDED}",
    "-O2 -fstack-protector-strong",
    "-O2 -fno-omit-frame-pointer",
    f"-O0 -fstack-protector-all {GUARDED}",
    f"-Os -fstack-protector-all -fno-omit-frame-pointer {GUARDED}",
]
# A guard's call that never returns lies amidst the function then, and looks as if it did; on x86 the guard is
# known by its address.
UNKNOWN_GUARD = [flags for flags in FLAGS if MACHINE == "aarch64" and "protector-all" in flags]
FREE = {"all_known", "tries_again", "crowded", "early"}  # nothing is passed where it succeeds
TOLD = {"shared_way_out", "checked_first", "reused_place", "two_tails", "undone"}
REFUSED = {"never_tested", "tail_call", "selected", "computed_jump", "half_tested"}
EITHER = {"tells_often", "frame_given_away", "stack_arguments"}  # as the compiler lays them out


def needs_capstone() -> None:
    pytest.importorskip("capstone", reason="capstone is not installed")


def reader(blob: bytes) -> Callable[[int, int], bytes]:
    """Return a function that reads an ELF file's text by its addresses."""
    (table,) = struct.unpack_from("=Q", blob, 0x20)
    size, count = struct.unpack_from("=HH", blob, 0x36)
    headers = [struct.unpack_from("=IIQQQQQQ", blob, table + size * i) for i in range(count)]
    texts = [(item[2], item[3], item[5]) for item in headers if item[0] == 1 and item[1] & 1]

    def read(address: int, count: int) -> bytes:
        for offset, start, length in texts:
            if start <= address < start + length:
                return blob[offset + address - start : offset + min(address - start + count, length)]
        return b""

    return read


def answer(library: Path, name: str) -> tuple[Branch, ...]:
    """Return what is said of a function, nothing where it is refused."""
    blob = library.read_bytes()
    try:
        return failing_branches(reader(blob), *dynamic_functions(blob)[name], PARAMETERS, MACHINE)
    except Undecided as why:
        assert str(why) and "\n" not in str(why)
        return ()


def words(line: str) -> dict[str, str]:
    return dict(part.split("=") for part in line.split()[1:])


def value(state: dict[str, str], place: Place) -> int:
    """Return what lies in a place of a stopped process."""
    if place.register:
        return int(state[place.register], 16) & ((1 << 8 * place.size) - 1)
    assert place.offset >= 0
    return int.from_bytes(bytes.fromhex(state["stack"])[place.offset :][: place.size], "little")


def compiler() -> str:
    if MACHINE not in ("x86_64", "aarch64"):
        pytest.skip(f"the instructions of {MACHINE} are not modelled")
    found = shutil.which("gcc")
    if not found:
        pytest.skip("gcc is not installed")
    return found


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    needs_capstone()
    gcc = compiler()
    folder = tmp_path_factory.mktemp("shapes")

    @functools.cache
    def build(flags: str) -> Path:
        target = folder / (flags.replace(" ", "") + ".so")
        source = C_TESTS / "branch_shapes.c"
        options = ["-shared", "-fPIC", "-fno-stack-protector", *flags.split()]
        subprocess.run([gcc, *options, "-Wall", "-Wextra", "-Werror", source, "-o", target], check=True)
        return target

    return build


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("runner") / "runner"
    options = ["-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler(), *options, C_TESTS / "branch_runner.c", "-o", target, "-ldl"], check=True)
    return target


def check(runner: Path, library: Path, name: str, branches: tuple[Branch, ...]) -> set[bool]:
    """Run the function in many ways: is one of the branches hit, once, when it fails, and then only, and are
    the parameters where they are said to be? Return how it ended.
    """
    addresses = {f"{branch.address:x}": branch for branch in branches}
    assert len(addresses) == len(branches)
    done = subprocess.run([runner, library, name, *addresses], check=False, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("this machine does not let a process be traced")
    assert done.returncode == 0, done.stderr
    passed: list[dict[str, str]] = []
    seen = set()
    for line in done.stdout.splitlines():
        if line.startswith("hit"):
            passed.append(words(line))
            continue
        end = words(line)
        failed = end["null"] == "1"
        seen.add(failed)
        hits = 0
        for state in passed:
            branch = addresses[state["at"]]
            hits += branch.zero is None or value(state, branch.zero) == 0
            for parameter, place in branch.where.items():
                assert place.size == PARAMETERS[parameter]
                assert value(state, place) == int(end[parameter], 16), (name, parameter, place, line)
        assert hits == int(failed), (name, line)
        assert len({state["at"] for state in passed}) == len(passed), (name, line)
        passed = []
    return seen


@pytest.mark.parametrize("flags", FLAGS)
def test_what_is_answered_is_what_happens(shapes: Callable[[str], Path], runner: Path, flags: str) -> None:
    library = shapes(flags)
    for name in sorted(FREE | TOLD | REFUSED | EITHER):
        branches = answer(library, name)
        if name in FREE | TOLD and flags not in UNKNOWN_GUARD:
            assert branches, name
        if name in FREE:
            assert not any(branch.zero for branch in branches), name
        if name in REFUSED:
            assert not branches, name
        if branches:
            assert check(runner, library, name, branches) == {True, False}, name


@pytest.mark.parametrize("flags", [flags for flags in FLAGS if flags not in UNKNOWN_GUARD])
def test_what_is_still_needed_is_found(shapes: Callable[[str], Path], flags: str) -> None:
    (branch,) = answer(shapes(flags), "all_known")
    if "-O0" not in flags:
        assert set(branch.where) == set(PARAMETERS)


def test_verbs_of_this_shape_are_followed_in_each_way(shapes: Callable[[str], Path]) -> None:
    """Compilers lay them out with one address for what fails, with more, and with one that needs a look."""
    names = ["undone", "two_tails", "shared_way_out", "checked_first"]
    found = [answer(shapes(flags), name) for flags in FLAGS for name in names]
    assert any(len(branches) == 1 and branches[0].zero is None for branches in found)
    assert any(len(branches) > 1 and not any(branch.zero for branch in branches) for branches in found)
    assert any(branch.zero for branches in found for branch in branches)
    assert any({"addr", "length"} <= set(branch.where) for branches in found for branch in branches)


def x86(text: str) -> bytes:
    return bytes.fromhex(text)


X86_FAILS = x86(
    "55 4889f5 ff17 4885c0 7405 48892e 5d c3 31c0 5d c3"
)  # push rbp; mov rbp, rsi; call [rdi]; test rax, rax; je +5; mov [rsi], rbp; pop rbp; ret
# xor eax, eax; pop rbp; ret
A64_FAILS = [
    0xA9BE7BFD,  # stp x29, x30, [sp, #-32]!
    0x910003FD,  # mov x29, sp
    0xF9000BF3,  # str x19, [sp, #16]
    0xAA0103F3,  # mov x19, x1
    0xF9400001,  # ldr x1, [x0]
    0xD63F0020,  # blr x1
    0xB4000080,  # cbz x0, +16
    0xF9400BF3,  # ldr x19, [sp, #16]
    0xA8C27BFD,  # ldp x29, x30, [sp], #32
    0xD65F03C0,  # ret
    0xD2800000,  # mov x0, #0
    0x17FFFFFC,  # b -16
]


def text(code: bytes) -> Callable[[int, int], bytes]:
    def read(address: int, count: int) -> bytes:
        return code[address - 0x1000 :][:count] if address >= 0x1000 else b""

    return read


def ask(
    code: bytes | list[int], machine: str = "x86_64", size: int | None = None, **parameters: int
) -> tuple[Branch, ...]:
    packed = code if isinstance(code, bytes) else struct.pack(f"<{len(code)}I", *code)
    needs_capstone()
    return failing_branches(
        text(packed), 0x1000, len(packed) if size is None else size, parameters or PARAMETERS, machine
    )


def one(
    code: bytes | list[int], machine: str = "x86_64", size: int | None = None, **parameters: int
) -> Branch:
    (branch,) = ask(code, machine, size, **parameters)
    return branch


def test_the_first_of_equally_good_addresses() -> None:
    assert one(X86_FAILS) == Branch(0x1010, {"addr": Place("rbp")})
    assert one(A64_FAILS, "aarch64") == Branch(0x1028, {"addr": Place("x19")})


# push rbx; mov rbx, rsi; call [rdi]; test rax, rax; je +3; mov [rax], rbx; pop rbx; ret
SHARED = x86("53 4889f3 ff17 4885c0 7403 488918 5b c3")


def test_what_fails_and_shares_the_way_out() -> None:
    """Before its pops, since the parameters are still there."""
    assert one(SHARED) == Branch(0x100E, {"addr": Place("rbx")}, Place("rax"))
    # ... cbz x0, +8; str x19, [x0]; ldr x19, [sp, #16]; ldp x29, x30, [sp], #32; ret
    code = [*A64_FAILS[:6], 0xB4000040, 0xF9000013, *A64_FAILS[7:10]]
    assert one(code, "aarch64") == Branch(0x1020, {"addr": Place("x19")}, Place("x0"))


def test_what_lies_on_the_stack_tells_too() -> None:
    # sub rsp, 24; call [rdi]; mov [rsp+8], rax; test rax, rax; mov eax, 0; je +5; mov [rsp+16], rbx
    # mov rax, [rsp+8]; add rsp, 24; ret
    code = x86("4883ec18 ff17 4889442408 4885c0 b800000000 7405 48895c2410 488b442408 4883c418 c3")
    assert one(code) == Branch(0x101A, {}, Place(offset=8))


def test_two_ways_to_fail_that_share_nothing() -> None:
    # push rbx; call [rdi]; test rax, rax; je +13; call [rdi]; test rax, rax; je +2; pop rbx; ret
    # xor eax, eax; pop rbx; ret; nop; xor eax, eax; pop rbx; ret
    code = x86("53 ff17 4885c0 740d ff17 4885c0 7402 5b c3 31c0 5b c3 90 31c0 5b c3")
    assert [(branch.address, branch.zero) for branch in ask(code)] == [(0x1011, None), (0x1015, None)]


def test_an_address_for_one_failure_and_a_condition_for_the_other() -> None:
    # test edx, edx; je +13; push rbx; call [rdi]; test rax, rax; je +3; mov [rax], rbx; pop rbx; ret
    # xor eax, eax; ret
    code = x86("85d2 740d 53 ff17 4885c0 7403 488918 5b c3 31c0 c3")
    first, second = ask(code)
    assert (first.address, first.zero) == (0x100F, Place("rax"))
    assert (second.address, second.zero) == (0x1011, None)


def test_more_ways_to_fail_than_probes() -> None:
    # test edi, edi; je +3; xor eax, eax; ret; test esi, esi; je +3; ... mov eax, 1; ret
    ways = [x86(f"{test} 7403 31c0 c3") for test in ("85ff", "85f6", "85d2", "85c9", "85db")]
    end = x86("b801000000 c3")
    assert [branch.address for branch in ask(b"".join(ways[:4]) + end)] == [0x1004, 0x100B, 0x1012, 0x1019]
    with pytest.raises(Undecided, match="no addresses tell"):
        ask(b"".join(ways) + end)


def test_a_place_that_holds_what_was_is_no_condition() -> None:
    """rax was NULL before, and is another value where it is returned."""
    # push rbx; call [rdi]; mov rbx, rax; test rbx, rbx; je +1; nop; call [rdi]; test rax, rax; je +1; nop
    # pop rbx; ret
    code = x86("53 ff17 4889c3 4885db 7401 90 ff17 4885c0 7401 90 5b c3")
    assert one(code) == Branch(0x1014, {}, Place("rax"))


def test_a_condition_is_looked_at_once() -> None:
    # push rbx; jmp over; L: dec rbp; je out; over: call [rdi]; test rax, rax; je L; out: pop rbx; ret
    code = x86("53 eb05 48ffcd 7407 ff17 4885c0 74f4 5b c3")
    assert one(code) == Branch(0x100F, {}, Place("rax"))


def test_half_of_a_pointer() -> None:
    """A low half that is not zero makes a pointer that is not NULL; one that is zero says nothing."""
    # push rbx; call [rdi]; test eax, eax; je +2; pop rbx; ret; xor eax, eax; pop rbx; ret
    assert one(x86("53 ff17 85c0 7402 5b c3 31c0 5b c3")).address == 0x1009
    with pytest.raises(Undecided, match="no branch has found out"):
        ask(x86("53 ff17 85c0 7402 5b c3 5b c3"))  # the pointer is returned there, too


def test_what_another_turn_of_a_loop_returned_says_nothing() -> None:
    # push rbx; L: mov rbx, rax; call [rdi]; test rbx, rbx; jne L; pop rbx; ret
    code = x86("53 4889c3 ff17 4885db 75f6 5b c3")
    with pytest.raises(Undecided, match="no branch has found out"):
        ask(code)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("ffe0", "jumps to where a register or memory says"),
        ("ff2500000000", "jumps to where a register or memory says"),
        ("0f05 31c0 c3", "not modelled"),  # syscall
        ("f348ab 31c0 c3", "prefix is not modelled"),  # rep stosq
        ("4883ec08 31c0 c3", "stack pointer that is not as it was"),
        ("31c0", "runs on past the end"),
        ("b801000000 c3", "no path returns NULL"),
        ("ff17 c3", "no branch has found out"),
        ("06", "no instruction that is known"),
        ("31c0 c20800", "removes its arguments"),
        ("e800000000 31c0 c3", "into the middle of the function"),
        ("eb1e", "the text ends here"),
        ("c8100000 c9 31c0 c3", "not modelled"),  # enter
    ],
)
def test_what_is_refused_on_x86(code: str, why: str) -> None:
    with pytest.raises(Undecided, match=why):
        ask(x86(code))


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ([0xD61F0200], "jumps to where a register says"),  # br x16
        ([0xD63F0020, 0xD65F03C0], "no branch has found out"),  # blr x1; ret
        ([0xD10043FF, 0xD2800000, 0xD65F03C0], "stack pointer that is not as it was"),  # sub sp, sp, #16
        ([0xD2800000, 0xD65F0020], "jumps to where a register says"),  # ret x1
        ([0xD4000001, 0xD2800000, 0xD65F03C0], "not modelled"),  # svc #0
        ([0xD2800020, 0xD65F03C0], "no path returns NULL"),  # mov x0, #1
    ],
)
def test_what_is_refused_on_aarch64(code: list[int], why: str) -> None:
    with pytest.raises(Undecided, match=why):
        ask(code, "aarch64")


def test_a_call_at_the_end_never_returns() -> None:
    """As of __stack_chk_fail: without it, its path would run on into what follows."""
    # push rbx; call [rdi]; test rax, rax; je +2; pop rbx; ret
    # test ebx, ebx; jne +4; xor eax, eax; pop rbx; ret; call [rdi]
    code = x86("53 ff17 4885c0 7402 5b c3 85db 7504 31c0 5b c3 ff17")
    assert one(code).address == 0x100A
    # What follows is another function's.
    assert one(code + x86("c3"), size=len(code)).address == 0x100A
    with pytest.raises(Undecided):
        ask(code + x86("c3"))


def test_code_outside_is_followed_and_never_chosen() -> None:
    # push rbx; call [rdi]; test rax, rax; je cold; pop rbx; ret; | cold: xor eax, eax; pop rbx; ret
    code = x86("53 ff17 4885c0 7402 5b c3 31c0 5b c3")
    assert one(code).address == 0x100A
    with pytest.raises(Undecided, match="no addresses tell"):
        ask(code, size=10)


def test_arguments_on_the_stack_are_the_callees() -> None:
    """What was pushed right before a call may have changed after it, unless it is read again."""
    # push rbx; push rsi; call [rdi]; test rax, rax; je +6; add rsp, 8; pop rbx; ret
    # xor eax, eax; add rsp, 8; pop rbx; ret
    pushed = x86("53 56 ff17 4885c0 7406 4883c408 5b c3 31c0 4883c408 5b c3")
    assert one(pushed).where == {}
    # ... and on the other path: mov rdx, [rsp]
    read_again = x86("53 56 ff17 4885c0 740a 488b1424 4883c408 5b c3 31c0 4883c408 5b c3")
    assert one(read_again) == Branch(0x1013, {"addr": Place(offset=0)})


def test_a_frame_that_others_know_is_forgotten() -> None:
    # push rsi; sub rsp, 16; lea rcx, [rsp+16] or a nop; call [rdi]; test rax, rax; je +5; add rsp, 24; ret
    # xor eax, eax; add rsp, 24; ret
    known = x86("56 4883ec10 0f1f440000 ff17 4885c0 7405 4883c418 c3 31c0 4883c418 c3")
    given = x86("56 4883ec10 488d4c2410 ff17 4885c0 7405 4883c418 c3 31c0 4883c418 c3")
    assert one(known).where == {"addr": Place(offset=16)}
    assert one(given).where == {}


def test_parameters_of_four_bytes() -> None:
    """Their upper half is anything; what was extended or cut is another value."""
    # push rbp; mov ebp, esi; call [rdi]; test rax, rax; je +2; pop rbp; ret; xor eax, eax; pop rbp; ret
    code = x86("55 89f5 ff17 4885c0 7402 5d c3 31c0 5d c3")
    assert one(code, pd=8, fd=4).where == {"fd": Place("rbp", size=4)}
    assert one(code, pd=8, addr=8).where == {}


def test_addresses_that_are_easy_to_probe_come_first() -> None:
    # push rbx; call [rdi]; test rax, rax; je +2; pop rbx; ret
    # lea rcx, [rip]; jmp +0; xor eax, eax; pop rbx; ret
    code = x86("53 ff17 4885c0 7402 5b c3 488d0d00000000 eb00 31c0 5b c3")
    assert one(code).address == 0x1013


def test_other_machines_and_arguments() -> None:
    for why, machine, size, parameters in (
        ("riscv64 are not modelled", "riscv64", 1, {"a": 8}),
        ("where the function ends", "x86_64", 0, {"a": 8}),
        ("neither 4 nor 8", "x86_64", 1, {"a": 2}),
        ("more parameters", "x86_64", 1, dict.fromkeys("abcdefg", 8)),
    ):
        with pytest.raises(Undecided, match=why):
            ask(b"\xc3", machine, size, **parameters)


def test_without_a_disassembler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "capstone", None)
    with pytest.raises(Undecided, match="install the package capstone"):
        failing_branches(lambda address, count: b"", 0, 1, {}, "x86_64")


PIECES = [X86_FAILS, SHARED, struct.pack(f"<{len(A64_FAILS)}I", *A64_FAILS)]


def holds(
    code: bytes, branches: tuple[Branch, ...], machine: str = "x86_64", size: int | None = None
) -> bool:
    """Whether exactly one branch is hit on each path to NULL, and none on those to a value: asked of all
    paths one by one, as the choice does not.
    """
    span = range(0x1000, 0x1000 + (len(code) if size is None else size))
    graph = follow(text(code), span, PARAMETERS, machine)
    by_address = {branch.address: branch for branch in branches}
    waiting, seen = [(0, 0)], {(0, 0)}
    while waiting:
        at, hits = waiting.pop()
        branch = by_address.get(graph.addresses[at])
        zero: bool | None = branch is not None
        if branch is not None and branch.zero is not None:
            zero = graph.states[at].decided().get(branch.zero)
        for hit in (False, True) if zero is None else (zero,):
            now = min(hits + hit, 2)
            if graph.ends.get(at, End.NEVER) is not End.NEVER and now != (graph.ends[at] is End.NULL):
                return False
            more = {(item, now) for item in graph.edges[at]} - seen
            seen |= more
            waiting += more
    return True


@given(
    parts=st.lists(
        st.one_of(
            st.binary(max_size=24),
            st.sampled_from(PIECES),
            st.builds(
                lambda piece, a, b: piece[min(a, b) : max(a, b)],
                st.sampled_from(PIECES),
                *[st.integers(0, 48)] * 2,
            ),
        ),
        max_size=8,
    ),
    size=st.integers(0, 200),
    machine=st.sampled_from(["x86_64", "aarch64"]),
)
@settings(max_examples=300, deadline=10_000)
def test_no_bytes_are_a_surprise(parts: list[Any], size: int, machine: str) -> None:
    code = b"".join(parts)
    try:
        found = ask(code, machine, size)
    except Undecided:
        return
    assert 1 <= len(found) <= 4
    for branch in found:
        assert 0x1000 <= branch.address < 0x1000 + size
        assert set(branch.where) <= set(PARAMETERS)
    assert holds(code, found, machine, size)


SHUFFLED = [
    *map(
        x86,
        ("90", "ff17", "4885c0", "4885db", "85f6", "4889c3", "4889d8", "31c0", "4889442408", "488b442408"),
    ),
    *(
        x86(jump) + bytes([over])
        for jump in ("74", "75", "72")
        for over in (1, 2, 3, 4, 5, 6, 8, 10, 12, 0xF0)
    ),
]  # nop; call [rdi]; test rax, rax; test rbx, rbx; test esi, esi; mov rbx, rax; mov rax, rbx; xor eax, eax
# mov [rsp+8], rax; mov rax, [rsp+8]; je, jne, jb
WAYS_OUT = [x86("4883c418 c3"), x86("31c0 4883c418 c3")]  # [xor eax, eax;] add rsp, 24; ret


@given(
    parts=st.lists(
        st.one_of(st.sampled_from(SHUFFLED), st.just(x86("ff17 4885c0")), st.sampled_from(WAYS_OUT)),
        max_size=14,
    )
)
@settings(max_examples=400, deadline=10_000)
def test_what_is_chosen_holds_on_every_path(parts: list[bytes]) -> None:
    code = x86("4883ec18") + b"".join(parts) + WAYS_OUT[0]
    try:
        found = ask(code)
    except Undecided:
        return
    assert holds(code, found)
