"""The rules of proof: each looks at one piece of evidence and says whether it holds.

A rule answers `ok`, `missing` (the record does not prove it; `how` says what would) or `contradicted` (the
record proves the opposite). Kernel functions are named with the file that holds them in Linux 7.3; the same
rule holds on 5.10, 6.1 and 6.12 where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from regrepro.judge import owners
from regrepro.judge.contracts import Contract, pin_contract
from regrepro.judge.facts import Buffer, Facts, Pass, Pin, Registration
from regrepro.judge.frames import pins_on, same_frames
from regrepro.judge.owners import UNASKED, held_now, rose
from regrepro.judge.pagestate import PIN_BIAS, PageState, cache_references
from regrepro.judge.spans import Spans
from regrepro.kernel_functions import Family

TRANSIENT = 1
"""A page in a per-CPU LRU batch (mm/swap.c) has one reference more, and so has one in the swap cache."""

OK, MISSING, CONTRADICTED = "ok", "missing", "contradicted"


@dataclass(frozen=True)
class Check:
    """What one rule found. `text` is a clause that can stand alone; `how` says how to get what is missing."""

    name: str
    state: str
    text: str
    how: str = ""

    @property
    def ok(self) -> bool:
        """Whether the rule holds."""
        return self.state == OK

    def as_unmet(self) -> dict[str, str]:
        """Return it as an item of a verdict's `unmet`."""
        return {"need": self.name, "why": self.text, "how": self.how}


def missing(name: str, text: str, how: str = "") -> Check:
    """What the record does not prove."""
    return Check(name, MISSING, text, how)


@dataclass
class Case:
    """One registration under test, with what the rules look at."""

    facts: Facts
    run: Pass
    registration: Registration
    buffer: Buffer

    @cached_property
    def held(self) -> list[Pin]:
        """Pins that stood on pages of the registration when it began, whatever mapping they were taken by."""
        return pins_on(self.registration)

    @cached_property
    def plain(self) -> list[Pin]:
        """Of these, those without FOLL_LONGTERM: FOLL_PIN and FOLL_GET, and a pin of a driver's or a user's
        that was expected to ask for it and left its pages in unpinnable memory.
        """
        return [
            pin
            for pin in self.held
            if pin.kind in ("pin", "get") or (pin.owner in UNASKED and self.contract(pin).kind == "plain")
        ]

    def contract(self, pin: Pin) -> Contract:
        """What a pin did to unpinnable pages (`contracts.pin_contract`)."""
        taken = self.run.pins[pin.id]  # as it was taken, by the pages of its own buffer
        return pin_contract(self.run.buffers[taken.buffer], taken)

    def owner(self, pin: Pin) -> str:
        """Name who holds a pin (`owners.owner_of`)."""
        taken = self.run.pins[pin.id]
        return owners.owner_of(self.facts, self.run.buffers[taken.buffer], taken)

    @cached_property
    def seqs(self) -> frozenset[int]:
        """The events that what is said of this registration rests on: itself, the pins held at it, their
        releases, and the same call after them; and how its buffer was made.
        """
        of_pins = [pin.seq for pin in self.held]
        releases = [pin.release.seq for pin in self.held if pin.release is not None]
        again = same_call_after_release(self)
        third = _pinned_again(self, again) if again is not None else None
        calls = [call.seq for call in (self.registration, again, third) if call is not None]
        pins_of_third = [pin.seq for pin in third.standing] if third is not None else []
        return frozenset((self.buffer.seq, *of_pins, *releases, *calls, *pins_of_third))

    def may_be_copied(self, state: PageState) -> Spans:
        """The pages that a write may have replaced by copies."""
        return state.copied_by_a_write(shared_mapping=self.buffer.shared_mapping)

    @cached_property
    def unpinnable(self) -> Spans:
        """The pages of the registration that were unpinnable when it began."""
        before = self.registration.before
        return before.unpinnable & self.registration.spans if before else Spans()

    @cached_property
    def pinned(self) -> Spans:
        """The pages of the registration that plain pins held. A pin of a part of a large folio holds all of
        it: its count stands in the head page, and the record repeats it on each page of the folio.
        """
        spans = Spans.of(pair for pin in self.plain for pair in pin.spans.pairs)
        before = self.registration.before
        if before and spans:
            held = before.where("pincount", lambda count: count > 0)
            touched = Spans.of(pair for pair in held.pairs if Spans.of([pair]) & spans)
            spans = spans | touched
        return spans & self.registration.spans

    @cached_property
    def stuck(self) -> Spans:
        """The pages that this bug would keep in place: pinned and unpinnable."""
        return self.unpinnable & self.pinned

    @cached_property
    def reached(self) -> Spans | None:
        """The pages that the registration had tried to pin when it failed; None where that is not known."""
        before, batch = self.registration.before, self.facts.pages_per_batch
        if before is None or not self.stuck:
            return None
        if not self.registration.through_umem:
            return self.registration.spans
        if batch is None:
            return None
        return reached(self.registration.spans, self.unpinnable, before.present, self.stuck, batch)

    @cached_property
    def must_move(self) -> Spans:
        """The unpinnable, unpinned pages that were tried: migration has moved them out."""
        return (self.unpinnable & (self.reached or Spans())) - self.pinned


def reached(asked: Spans, unpinnable: Spans, present: Spans, stuck: Spans, batch: int) -> Spans:
    """How far a failing registration came.

    `__ib_umem_get_va` (drivers/infiniband/core/umem.c; `ib_umem_get` before 7.x) pins at most PAGE_SIZE /
    sizeof(struct page *) pages a call, from 5.10 to 7.3. In each call `gup_fast_fallback` (mm/gup.c;
    `internal_get_user_pages_fast` in 5.10 and 6.1) first takes the pages that need no work, up to the first
    unpinnable or absent one, and gives the rest to `__gup_longterm_locked`, which migrates them all or
    fails. If that fails after some were taken, the call returns how many, and the next call begins there;
    so the last try begins at the first page that is stuck, or where a call had nothing to take first.
    """
    if not asked or not stuck:
        return asked
    begin, end = asked.pairs[0][0], asked.pairs[-1][1]
    first_stuck = stuck.first
    needs_work = unpinnable | (asked - present)
    at = begin
    while at < end:
        stop = min(at + batch, end)
        if first_stuck >= stop:
            at = stop
            continue
        work = needs_work & Spans.range(at, stop)
        if work and work.first == at:
            return Spans.range(begin, stop)
        return Spans.range(begin, min(first_stuck + batch, end))
    return asked


def whole_record(case: Case) -> Check:
    """Nothing of the pass is missing from the record, and nothing in it is malformed."""
    if case.run.problems:
        return missing(
            "record", f"the record of this pass has a flaw: {case.run.problems[0]}", "run it again"
        )
    if not case.run.finished:
        return missing("record", "the scenario did not run to its end", "run it again")
    return Check("record", OK, "the record of this pass is whole")


def can_be_refused_migration(registration: Registration) -> bool:
    """Whether an errno can come of pages that would not move.

    io_uring says EFAULT, too: `gup_fast_fallback` (mm/gup.c) returns the pages that it had pinned before the
    one that was refused, and `io_pin_pages` (io_uring/memmap.c) makes -EFAULT of a part.
    """
    errno = registration.errno
    return errno == "ENOMEM" or (errno == "EFAULT" and not registration.through_umem)


def errno_is_enomem(case: Case) -> Check:
    """`migrate_longterm_unpinnable_folios` (mm/gup.c) turns pages that would not move into -ENOMEM, and every
    function above passes it on. (5.10's check_and_migrate_cma_pages: `ret > 0 ? -ENOMEM : ret`.)
    """
    errno = case.registration.errno
    if errno == "ENOMEM":
        return Check("errno", OK, "the registration failed with ENOMEM")
    if can_be_refused_migration(case.registration):
        why = f"io_uring says {errno} where it could pin a part of the range, for whatever cause"
        return missing("errno", why, "register with an RDMA device")
    return Check("errno", CONTRADICTED, f"the registration failed with {errno}, and this bug gives ENOMEM")


def unpinnable_at_that_moment(case: Case) -> Check:
    """Pinned pages lay in a CMA or isolated pageblock or in ZONE_MOVABLE right before the call:
    `folio_is_longterm_pinnable` (include/linux/mm.h) says which.
    """
    name, how = "placement", "run as root: the pageblock map needs /proc/kcore and /proc/self/pagemap"
    before = case.registration.before
    if before is None:
        why = case.registration.pages_unknown or "the pages were not read right before the registration"
        return missing(name, why, how)
    if before.how != "observed":
        return missing(name, "the placement of the pages was not observed", how)
    unsure = (case.registration.spans - before.placed("ordinary", "absent")) - before.unpinnable
    if unsure:
        return missing(name, f"where page {unsure} lies is not known", how)
    if case.stuck:
        return Check(name, OK, f"{case.stuck.total} pinned pages were unpinnable when the registration began")
    if case.unpinnable:
        return Check(name, CONTRADICTED, "none of the unpinnable pages was pinned")
    return Check(name, CONTRADICTED, "no page of the registration was unpinnable when it began")


def pin_held_and_alive(case: Case) -> Check:
    """A pin was held before the call and was still alive after it: each pin object answers for itself (the
    blocked thread, the pipe that still holds its pages, the stand-in). A driver's own pin cannot be asked;
    then its references must stand on the pages before and after (see
    `references_on_exactly_the_pinned_pages`).
    """
    name = "pin"
    if not case.plain:
        return missing(name, "no pin without FOLL_LONGTERM was held on these pages", "take one before")
    unasked = False
    for pin in case.plain:
        flaw = not_alive(case, pin)
        if flaw:
            return missing(name, flaw, "keep the pin until the registration has returned")
        unasked = unasked or case.registration.alive.get(pin.id) != (True, True)
    if unasked:
        text = "the pin was not released before the registration returned (its owner cannot be asked)"
        return Check(name, OK, text)
    return Check(name, OK, "the pin was alive before and after the registration")


def not_alive(case: Case, pin: Pin) -> str:
    """Why a pin counts as not alive around the registration, or an empty string."""
    answers = case.registration.alive.get(pin.id)
    if answers is None:
        return f"whether pin {pin.id} ({pin.owner}) was alive is not recorded"
    for when, alive in zip(("before", "after"), answers, strict=True):
        if alive is False:
            return f"pin {pin.id} ({pin.owner}) was not alive {when} the registration"
        if alive is None and not (pin.owner in UNASKED and pin.kind != "get"):
            return f"pin {pin.id} ({pin.owner}) was not seen to be alive {when} the registration"
    return ""


def first_under_the_pin(case: Case) -> Check:
    """No earlier registration of these pages succeeded under the same pins: it had to move them, too."""
    first_pin = min((pin.seq for pin in case.plain), default=case.registration.seq)
    for earlier in (*case.run.registrations, *case.run.in_series):
        if (
            first_pin < earlier.seq < case.registration.seq
            and earlier.succeeded
            and _pages_of(earlier, case) & case.stuck
        ):
            text = "an earlier registration of the same pages succeeded under the same pin"
            return Check("order", CONTRADICTED, text)
    return Check("order", OK, "it was the first registration of these pages under the pin")


def _pages_of(earlier: Registration, case: Case) -> Spans:
    """The pages of the case's buffer that another registration was of: by their frames in another buffer."""
    if earlier.buffer == case.buffer.id:
        return earlier.spans
    before = case.registration.before
    if earlier.after is None or before is None:
        return Spans()
    return same_frames(earlier.after, earlier.spans, before)


def exactly_the_pinned_pages_stayed(case: Case) -> Check:
    """Movement is by page: `migrate_pages` (mm/migrate.c) moves every page of the batch that it can before it
    answers how many it could not. Pages of later batches were never tried and do not count (see `reached`).
    """
    name, how = "movement", "run as root: PFNs need CAP_SYS_ADMIN"
    before, after = case.registration.before, case.registration.after
    if before is None or after is None:
        return missing(name, "the PFNs before and after the registration are not both known", how)
    if not case.stuck:
        return missing(name, "no page was seen that a pin of this scenario should have kept", how)
    if case.reached is None:
        return missing(name, "how far the registration came is not known (page size missing)", how)
    unmoved, moved = before.unmoved(after), before.moved(after)
    unseen = (case.stuck | case.must_move) - unmoved - moved
    if unseen:
        return missing(name, f"whether page {unseen} moved was not seen", how)
    gone = case.stuck & moved
    if gone:
        return Check(name, CONTRADICTED, f"pinned page {gone} moved, so the pin did not hold it")
    stayed = case.must_move & unmoved
    if stayed:
        return Check(name, CONTRADICTED, f"page {stayed} was not pinned and did not move either")
    elsewhere = case.stuck - after.unpinnable
    if elsewhere:
        return missing(name, f"page {elsewhere} is no longer known to be unpinnable", how)
    where_to = case.must_move - after.placed("ordinary")
    if where_to:
        return missing(name, f"page {where_to} moved, but not provably out of unpinnable memory", how)
    others = f", the {case.must_move.total} others moved out" if case.must_move else ""
    return Check(name, OK, f"exactly the {case.stuck.total} pinned pages stayed where they were{others}")


def _difference(case: Case, pin: Pin, spans: Spans, least: int) -> Spans:
    """The pages on which taking this pin raised, or releasing it lowered, the references."""
    came = rose(pin.before, pin.after, spans, least)
    fell = Spans()
    if pin.release is not None:
        fell = rose(case.registration.after, pin.release.after, spans, least, -1)
        for later in case.run.registrations:
            if later.seq > pin.release.seq and later.buffer == case.buffer.id:
                fell = fell | rose(case.registration.after, later.before, spans, least, -1)
                break
    return came | fell


def references_on_exactly_the_pinned_pages(case: Case) -> Check:
    """Raw reference counts, before and after the call. One FOLL_PIN adds GUP_PIN_COUNTING_BIAS to a small
    page and 1 to a large folio's `_pincount` (`try_grab_folio`, mm/gup.c); one FOLL_GET adds 1. One
    reference more can also be a per-CPU LRU batch, so for FOLL_GET the count must have risen with the pin
    or fallen with its release as well.
    """
    name, how = "references", "run as root: struct page is read through /proc/kcore"
    states = (("before", case.registration.before), ("after", case.registration.after))
    for when, state in states:
        if state is None or not (case.stuck <= (state.known("refcount") | state.known("pincount"))):
            return missing(name, f"the reference counts {when} the registration are not known", how)
        for pin in case.plain:
            mine = pin.spans & case.stuck
            least = PIN_BIAS if pin.kind == "pin" else 1
            proven = held_now(state, case.buffer, mine, least)
            if pin.kind == "pin":
                # Where nobody says what is due, a difference of 1,024 is proof as good.
                uncounted = mine - state.explained - state.known("pincount")
                proven = proven | (_difference(case, pin, mine, least) & uncounted)
            elif not mine <= state.explained:
                unexplained = mine - state.explained
                proven = proven | (unexplained & state.where("refcount", lambda count: count > 1))
            if mine - proven:
                text = f"page {mine - proven} had no reference of pin {pin.id} {when} the registration"
                return Check(name, CONTRADICTED, text)
            strange = mine - owners.taken(case.buffer, pin) if pin.owner in UNASKED else Spans()
            if strange:
                text = (
                    f"the references of page {strange} did not rise when {pin.api or pin.owner} was called, "
                    "so somebody else holds it"
                )
                return missing(name, text, "look who: regrepro watch --pins names who pins")
            if pin.kind == "get" and mine - _difference(case, pin, mine, 1):
                page = mine - _difference(case, pin, mine, 1)
                text = (
                    f"a single reference more on page {page} is no proof of pin {pin.id}: "
                    "it neither rose with the pin nor fell with its release"
                )
                return missing(name, text, how)
        count = sum(1 for pin in case.held if pin.kind != "get")
        excess = state.excess(cache_references(case.buffer.backing))
        counted = Spans.of((a, b) for a, b, value in excess if value >= PIN_BIAS * (count + 1))
        too_many = (counted & case.stuck) - state.known("pincount")
        if too_many:
            text = f"page {too_many} had more pins than the {count} of this scenario {when} the registration"
            own = any(pin.kind == "get" and pin.owner in UNASKED for pin in case.held)
            how = "if your code pins by FOLL_PIN, write kind='pin'" if own else ""
            return Check(name, CONTRADICTED, text, how)
        others = case.must_move if when == "before" else Spans()
        pinned_too = held_now(state, case.buffer, others, TRANSIENT + 1)
        if pinned_too:
            text = f"page {pinned_too} was not pinned but had references as if it were"
            return Check(name, CONTRADICTED, text)
    return Check(name, OK, "references stood above the baseline on exactly the pinned pages")


def trace_ends_in_a_failed_migration(case: Case) -> Check:
    """`migrate_pages` returns how many pages would not move, or -ENOMEM when there was no page to move to
    (mm/migrate.c); `mm_migrate_pages` looks the same in both cases. Where the kernel gives no trace, the rest
    must suffice: the trace is then named as missing.
    """
    name, trace = "trace", case.registration.trace
    if trace.status == "unavailable" and case.facts.could_trace:
        return missing(name, "this call was not traced although the kernel traced others", "run it again")
    if trace.status == "unavailable":
        return Check(name, OK, f"this kernel gives no trace ({trace.why or 'no reason recorded'})")
    if not trace.complete:
        how = "run with --trace on" if trace.status in ("off", "absent") else "run it again"
        return missing(name, f"the trace is {trace.status}: {trace.why or 'no reason recorded'}", how)
    values = trace.of(Family.GUP)
    if values and values[-1] >= 0:
        return Check(name, CONTRADICTED, "pin_user_pages_fast succeeded, so something else failed")
    if not trace.migrations:
        if trace.hidden("migrate_pages") and trace.hidden("mm_migrate_pages"):
            return Check(name, OK, "this kernel does not let migrate_pages be seen")
        return Check(name, CONTRADICTED, "no page was tried to be migrated for the pin")
    last = trace.migrations[-1]
    if last.returned is None:
        if last.failed == 0:
            return Check(name, CONTRADICTED, "the last migration left no page behind")
        if last.failed and trace.hidden("migrate_pages"):
            text = f"{last.failed} pages failed to migrate (migrate_pages cannot be seen here)"
            return Check(name, OK, text)
        return missing(name, "the return of migrate_pages was not seen", "run it again")
    if last.returned < 0:
        text = f"migrate_pages returned {last.returned}: there was no page to move to"
        return Check(name, CONTRADICTED, text)
    if last.returned == 0:
        return Check(name, CONTRADICTED, "migrate_pages moved every page")
    if last.reason is None and not trace.hidden("mm_migrate_pages"):
        return missing(name, "the reason of the migration was not seen", "run it again")
    if last.failed == 0:
        return Check(name, CONTRADICTED, "the tracepoint counts no page that failed to migrate")
    return Check(name, OK, f"migrate_pages left {last.returned} behind, reason {last.reason or 'not seen'}")


def same_call_after_release(case: Case) -> Registration | None:
    """The first registration, after every plain pin was released, that is the same call; else None."""
    releases = [pin.release.seq for pin in case.plain if pin.release is not None]
    if not releases or len(releases) != len(case.plain):
        return None
    after = max(releases)
    for later in case.run.registrations:
        if later.seq > after and later.shape == case.registration.shape:
            return later
    return None


def releasing_made_it_succeed(case: Case) -> Check:
    """A-B-A on one buffer: the same call, the same PFNs, still unpinnable, nothing changed but the pin; now
    it succeeds and the pages move. It shows that the pin was the cause, and that there was memory to move
    to.
    """
    name, how = "release", "release the pin and register the same range again in the scenario"
    for pin in case.plain:
        if pin.release is None:
            return missing(name, f"pin {pin.id} was never released", how)
        if pin.release.errno is not None:
            return missing(name, f"pin {pin.id} could not be released: {pin.release.errno}", how)
    later = same_call_after_release(case)
    if later is None:
        return missing(name, "the same registration was not tried again after the release", how)
    before = {pin.id for pin in case.held}  # of these the plain ones are gone: what is left did not change
    if any(pin.id not in before for pin in pins_on(later)):
        return missing(name, "another pin was held when the registration was tried again", how)
    if not later.succeeded:
        text = f"with the pin released the same registration still failed, with {later.errno}"
        return Check(name, CONTRADICTED, text)
    failed, again, done = case.registration.after, later.before, later.after
    if failed is None or again is None or done is None:
        return missing(name, "the pages around the second try were not read", "run as root")
    same = failed.unmoved(again) & again.unpinnable
    if case.stuck - same:
        text = f"page {case.stuck - same} was not provably the same unpinnable page at the second try"
        return missing(name, text, "run it again")
    out = again.moved(done) & done.placed("ordinary")
    if case.stuck - out:
        text = f"page {case.stuck - out} did not provably move at the second try"
        return missing(name, text, "run as root")
    contrary = _pinned_again(case, later)
    if contrary is not None and not contrary.succeeded:
        text = f"pinned again on ordinary memory, the registration failed as well, with {contrary.errno}"
        return Check(name, CONTRADICTED, text)
    text = "the same registration succeeded once the pin was released, and the pages moved out"
    return Check(name, OK, text)


def _pinned_again(case: Case, second: Registration) -> Registration | None:
    """The third part of A-B-A: the same call, pinned again, on pages that are ordinary now."""
    for later in case.run.registrations:
        if (
            later.seq > second.seq
            and later.buffer == case.buffer.id
            and later.before is not None
            and later.spans
            and pins_on(later)
            and later.spans <= later.before.placed("ordinary")
        ):
            return later
    return None


def pinned_again_succeeded(case: Case) -> bool | None:
    """Whether the third part of A-B-A was run and succeeded; None where it was not run."""
    second = same_call_after_release(case)
    third = _pinned_again(case, second) if second is not None else None
    return None if third is None else third.succeeded


PROOF: tuple[Callable[[Case], Check], ...] = (
    errno_is_enomem,
    pin_held_and_alive,
    unpinnable_at_that_moment,
    first_under_the_pin,
    exactly_the_pinned_pages_stayed,
    references_on_exactly_the_pinned_pages,
    trace_ends_in_a_failed_migration,
    releasing_made_it_succeed,
    whole_record,
)
"""All that must hold for `reproduced`, but the controls."""


def prove(case: Case) -> list[Check]:
    """Apply every rule of proof to a registration that failed."""
    return [rule(case) for rule in PROOF]
