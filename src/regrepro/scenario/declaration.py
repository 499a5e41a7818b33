"""The declaration of a scenario: `scenario`, `change`, `instead`, and the options of its own.

A scenario is a function of one argument, the stage. Its declaration says what it needs, what it expects and
which controls and variants it has. Every mistake in a file ends in a `ScenarioFileError`: one line,
`file:line: what is wrong; what to write instead`.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from regrepro.errors import UsageError
from regrepro.options import PROFILES, parse_size

if TYPE_CHECKING:
    from regrepro.stage import Stage

NEEDS = (
    "root",
    "unpinnable",
    "cma",
    "movable-zone",
    "registrar",
    "rdma",
    "cuda",
    "dmabuf",
    "peer-memory",
    "page-state",
    "userfaultfd",
    "io-uring",
    "lab",
)
KERNEL_NEED = re.compile(r"kernel(>=|<=|==|>|<)(\d+)\.(\d+)")
CONTRACTS = ("pin", "get", "longterm", "none")
EXPECTATIONS = ("reproduced", "not-reproduced", "other-failure", "unmet")
EXPECTATION_KEYS = ("verdict", "layer", "basis", "errno")
Expectation = str | Mapping[str, Any]
"""What a scenario expects under one contract: a verdict's name; `{"verdict": …, "layer": …, "basis": …,
"errno": …}`, each a word or a list of those that are right; or one of these for each range of kernels,
`{"kernel>=6.5": …, "kernel<6.5": …}`, of which the first that fits counts."""
CHANGES: dict[str, tuple[str, ...]] = {
    "pin": CONTRACTS,
    "place": ("ordinary", "unpinnable"),
    "fault": ("none",),
}
MAX_TIMEOUT = 24 * 3600

DEFAULT = "default"
"""The record's `variant` of a scenario that has no variants."""

_KEYWORDS = ("shows", "needs", "expects", "controls", "profiles", "timeout", "options", "tags")
_CONTROL_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
# So that NAME_VARIANT is a name, too, which no shell takes for a pattern.
_VARIANT_NAME = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*")
_REFERENCE = re.compile(r"[^\W\d]\w*(\[\w+\])?")
SIGNATURE = "def NAME(stage: Stage) -> None:"


class ScenarioFileError(UsageError):
    """A mistake in a scenario file: `file:line: what is wrong; what to write instead`, one line."""

    def __init__(self, file: str | Path, line: int | None, wrong: str, instead_write: str) -> None:
        self.file = str(file)
        self.line = line
        where = f"{file}:{line}" if line else str(file)
        super().__init__(f"{where}: {wrong}; {instead_write}")


@dataclass(frozen=True)
class Change:
    """A control that runs the same body with one variable changed."""

    variable: str
    value: str

    def __str__(self) -> str:
        return f"{self.variable}={self.value}"


@dataclass(frozen=True)
class Instead:
    """A control that is another scenario: its body runs in the place of this one's."""

    scenario: str

    def __str__(self) -> str:
        return f"instead {self.scenario}"


Control = Change | Instead

Value = bool | int | str
"""A value of a scenario's own option. Sizes are whole numbers of bytes."""


class Size(int):
    """The default of an option that is a size in bytes: `options={"length": Size(4096)}`.

    It takes `--option length=64K`; an option whose default is a plain number is a count, and takes digits.
    """


@dataclass(frozen=True)
class Scenario:
    """A scenario as declared, or one variant of it. Calling it runs its body."""

    function: str
    variant: str
    summary: str
    file: str
    line: int
    shows: str
    needs: tuple[str, ...]
    expects: Mapping[str, Expectation]
    controls: Mapping[str, Control]
    profiles: tuple[str, ...]
    timeout: float
    body: Callable[[Stage], None]
    options: Mapping[str, Value | tuple[str, ...]] = field(default_factory=dict)
    tags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What it is called by: its function's name, with the variant in brackets: `file[memfd]`."""
        return self.function if self.variant == DEFAULT else f"{self.function}[{self.variant}]"

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that means this one alone: `file[memfd]`, and `file_memfd`, which no shell expands."""
        return (self.name,) if self.variant == DEFAULT else (self.name, f"{self.function}_{self.variant}")

    def __call__(self, stage: Stage) -> None:
        self.body(stage)

    def declared(self) -> dict[str, Any]:
        """Return the declaration as the record's `scenario-begin` holds it."""
        return {
            "shows": self.shows,
            "needs": list(self.needs),
            "expects": {contract: _plain(expected) for contract, expected in self.expects.items()},
            "controls": {name: str(control) for name, control in self.controls.items()},
            "profiles": list(self.profiles),
            "timeout": self.timeout,
            **({"options": self.option_values(())} if self.options else {}),
            **({"tags": list(self.tags)} if self.tags else {}),
        }

    def option_values(self, given: Iterable[str]) -> dict[str, Value]:
        """Return the value of each option that this scenario declares: of `given`, else its default.

        `given`: `NAME=VALUE`, or `SCENARIO.NAME=VALUE` for one scenario or variant alone; what names no
        option of this scenario is another's. Raises `UsageError` for a value that does not fit.
        """
        values: dict[str, Value] = {
            name: default[0] if isinstance(default, tuple) else default
            for name, default in self.options.items()
        }
        for item in given:
            name, text = _split_option(item)
            owner, _, own = name.rpartition(".")
            if self._owns(owner) and own in self.options:
                values[own] = _option_value(f"--option {name}", text, self.options[own])
        return values

    def _owns(self, owner: str) -> bool:
        """Whether `OWNER.NAME` of an option means this scenario; without OWNER it means every one."""
        return owner in ("", self.function, *self.names)

    def contract(self, default_pin: str) -> str:
        """Return what a run's pin promises: `default_pin` where the scenario expects something of it."""
        return default_pin if default_pin in self.expects else next(iter(self.expects))


def change(**variable: str) -> Change:
    """Make a control that changes exactly one variable: `change(pin="none")`, `change(place="ordinary")`.

    `change(fault="none")` leaves out what `stage.faults` plants.
    """
    file, line = _caller()
    choices = " or ".join(f"change({name}={values[0]!r})" for name, values in CHANGES.items())
    if len(variable) != 1:
        raise ScenarioFileError(
            file, line, f"change() has {len(variable)} variables", f"a control changes exactly one: {choices}"
        )
    [(name, value)] = variable.items()
    if name not in CHANGES:
        raise ScenarioFileError(
            file, line, f"change() knows no variable {name!r}", suggest(name, CHANGES, f"write {choices}")
        )
    if value not in CHANGES[name]:
        raise ScenarioFileError(
            file, line, f"change({name}={value!r}) is not known", suggest(value, CHANGES[name])
        )
    return Change(name, value)


def instead(scenario: str) -> Instead:
    """Make a control that is another scenario: `instead("no_pin")`, `instead("file[memfd]")`."""
    if not isinstance(scenario, str) or not _REFERENCE.fullmatch(scenario):
        file, line = _caller()
        raise ScenarioFileError(
            file, line, f"instead({scenario!r}) names no scenario", 'write instead("no_pin")'
        )
    return Instead(scenario)


def _split_option(item: str) -> tuple[str, str]:
    name, equals, text = item.partition("=")
    if not equals or not name:
        raise UsageError(f"--option {item} sets nothing", hint="write --option NAME=VALUE")
    return name, text


def _option_value(what: str, text: str, default: Value | tuple[str, ...]) -> Value:
    """Return an option's value of its text, of the kind that the default has."""
    if isinstance(default, bool):
        if text.lower() not in ("true", "yes", "1", "false", "no", "0"):
            raise UsageError(f"{what}={text} is neither true nor false", hint=f"write {what}=true")
        return text.lower() in ("true", "yes", "1")
    if isinstance(default, Size):
        try:
            return parse_size(text) if text != "0" else 0
        except UsageError:
            hint = f"write a number with K, M, G or T, such as {what}=4M"
            raise UsageError(f"{what}={text} is no size", hint=hint) from None
    if isinstance(default, int):
        if not re.fullmatch(r"[0-9]{1,18}", text):
            hint = f"write digits, such as {what}={default}"
            raise UsageError(f"{what}={text} is no whole number", hint=hint)
        return int(text)
    if isinstance(default, tuple) and text not in default:
        raise UsageError(f"{what}={text} is not known", hint=suggest(text, default))
    return text


def check_options(scenarios: Iterable[Scenario], given: Iterable[str]) -> None:
    """Check that each given option is one of these scenarios' and fits it. Raises `UsageError`."""
    chosen, items = list(scenarios), list(given)
    for item in items:
        name, _ = _split_option(item)
        owner, _, own = name.rpartition(".")
        known = {option for one in chosen if one._owns(owner) for option in one.options}
        if own not in known:
            hint = "`regrepro list` shows the options of each"
            raise UsageError(
                f"--option {name} is no option of the scenarios that run",
                hint=suggest(own, known, hint) if known else hint,
            )
    for one in chosen:
        one.option_values(items)


def needs_by_name(scenarios: Iterable[Scenario]) -> dict[str, tuple[str, ...]]:
    """Return the needs of scenarios by each name that means one, or all its variants."""
    found: dict[str, tuple[str, ...]] = {}
    for one in scenarios:
        found |= dict.fromkeys(one.names, one.needs)
        found[one.function] = tuple(dict.fromkeys((*found.get(one.function, ()), *one.needs)))
    return found


# The scenarios of the file that is being loaded, in order; decorating outside of a load adds to nothing.
_loading: list[Scenario] | None = None


def scenario(*args: Any, **declaration: Any) -> Callable[[Callable[[Stage], None]], Scenario]:
    """Declare a scenario. Keywords:

    `shows`: which part of the write-up, in words. `needs`: what must be there (see `NEEDS`, and
    `kernel>=5.13`). `expects`: by the contract of the run's pin, see `Expectation`. `controls`: name →
    `change(…)` or `instead(…)`, at least one. `profiles`: which of `default`, `node`, `faults` it belongs to
    (may be empty).
    `timeout`: seconds. `options`: the scenario's own, name → default: true or false, a whole number (a
    count), `Size(…)` (bytes), a word, or a tuple of words of which the first is the default.
    `stage.option(NAME)` reads one, `--option` sets it. `tags`: words of your own, which `list` shows.

    `variants`: name → the keywords that differ: `{"memfd": {}, "large": {"timeout": 240}}`. Each runs and is
    judged by itself, with its controls. A keyword of a variant stands in the place of the scenario's.
    `stage.variant` is the name of the one that runs.
    """
    if args:
        file, line = _caller()
        code = getattr(args[0], "__code__", None)
        raise ScenarioFileError(
            code.co_filename if code else file,
            code.co_firstlineno if code else line,
            "@scenario stands without its declaration",
            "write @scenario(shows=…, expects={…}, controls={…}) with keywords",
        )

    def declare(body: Callable[[Stage], None]) -> Scenario:
        made = _declare_all(body, declaration)
        if _loading is not None:
            _loading.extend(made)
        return made[0]

    return declare


@contextmanager
def collecting() -> Iterator[list[Scenario]]:
    """Yield the list that scenarios are added to, in order, while their file is loaded."""
    global _loading  # noqa: PLW0603 - decorators have no other way to reach the load they belong to
    previous, _loading = _loading, []
    try:
        yield _loading
    finally:
        _loading = previous


def _declare_all(body: Callable[[Stage], None], given: Mapping[str, Any]) -> list[Scenario]:
    """Return the scenario of a declaration, or one for each of its variants. Raises `ScenarioFileError`."""
    code: CodeType | None = getattr(body, "__code__", None)
    if code is None:
        raise ScenarioFileError(*_caller(), "@scenario stands over no function", f"write {SIGNATURE}")
    shared = {keyword: value for keyword, value in given.items() if keyword != "variants"}
    if "variants" not in given:
        return [_Declaration(body, code, shared, DEFAULT).made()]
    variants = given["variants"]
    wrong = _Declaration(body, code, shared, DEFAULT).wrong
    write = 'write variants={"memfd": {}, "large": {"timeout": 240}}'
    if not isinstance(variants, Mapping) or not variants:
        raise wrong("variants", "variants names none", write)
    made = []
    for name, own in variants.items():
        if not isinstance(name, str) or not _VARIANT_NAME.fullmatch(name) or name == DEFAULT:
            raise wrong("variants", f"{name!r} is no name for a variant", 'write it like "memfd"')
        if not isinstance(own, Mapping):
            raise wrong("variants", f"variant {name} is no mapping of what differs", write)
        made.append(_Declaration(body, code, {**shared, **own}, name, frozenset(own)).made())
    return made


@dataclass(frozen=True)
class _Declaration:
    """The keywords over one function, for one variant; `made` checks them one by one."""

    body: Callable[[Stage], None]
    code: CodeType
    given: Mapping[str, Any]
    variant: str
    own: frozenset[str] = frozenset()
    """The keywords that the variant itself gives."""

    def wrong(self, keyword: str | None, what: str, write: str) -> ScenarioFileError:
        """Return the error of a keyword; None is the function itself."""
        name = self.code.co_name if self.variant == DEFAULT else f"{self.code.co_name}[{self.variant}]"
        line = _keyword_line(self.code, "variants" if keyword in self.own else keyword)
        return ScenarioFileError(self.code.co_filename, line, f"{name}: {what}", write)

    def made(self) -> Scenario:
        """Return the scenario. Raises `ScenarioFileError` for the first thing that is wrong."""
        for keyword in self.given:
            if keyword not in _KEYWORDS:
                known = (*_KEYWORDS, "variants") if self.variant == DEFAULT else _KEYWORDS
                raise self.wrong(keyword, f"@scenario knows no {keyword!r}", suggest(keyword, known))
        _check_signature(self.body, self.wrong)
        shows = self.given.get("shows")
        if not isinstance(shows, str) or not shows.strip():
            write = 'say which part of the write-up it shows: shows="section 13"'
            raise self.wrong("shows", "shows is missing", write)
        needs = self._words("needs", (), 'write needs=("root", "unpinnable", "registrar")')
        for need in needs:
            if need not in NEEDS and not KERNEL_NEED.fullmatch(need):
                raise self.wrong("needs", f"unknown need {need!r}", suggest(need, (*NEEDS, "kernel>=5.13")))
        profiles = self._words("profiles", ("default",), 'write profiles=("default",)')
        for profile in profiles:
            if profile not in PROFILES:
                raise self.wrong("profiles", f"unknown profile {profile!r}", suggest(profile, PROFILES))
        timeout = self.given.get("timeout", 60)
        is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
        if not is_number or not 0 < timeout <= MAX_TIMEOUT:
            raise self.wrong(
                "timeout", f"timeout={timeout!r} is no time", "write seconds, such as timeout=60"
            )
        summary = (inspect.getdoc(self.body) or "").strip().split("\n")[0]
        if not summary:
            raise self.wrong(
                None, "it has no docstring", "say in one line what it does: `regrepro list` shows it"
            )
        return Scenario(
            function=self.code.co_name,
            variant=self.variant,
            summary=summary,
            file=self.code.co_filename,
            line=self.code.co_firstlineno,
            shows=shows.strip(),
            needs=needs,
            expects=self._expects(),
            controls=self._controls(),
            profiles=profiles,
            timeout=timeout,
            body=self.body,
            options=self._options(),
            tags=self._words("tags", (), 'write tags=("shared-memory",)'),
        )

    def _words(self, keyword: str, default: tuple[str, ...], write: str) -> tuple[str, ...]:
        """Return a list or tuple of words; a lone word is a common slip, and none."""
        value = self.given.get(keyword, default)
        if not isinstance(value, (tuple, list)) or not all(isinstance(item, str) for item in value):
            raise self.wrong(keyword, f"{keyword} is no list of words", write)
        return tuple(value)

    def _expects(self) -> dict[str, Expectation]:
        expects = self.given.get("expects")
        if not isinstance(expects, Mapping) or not expects:
            write = 'write the verdict for each contract of the pin: expects={"pin": "reproduced"}'
            raise self.wrong("expects", "expects is missing", write)
        for contract, expected in expects.items():
            if contract not in CONTRACTS:
                raise self.wrong("expects", f"unknown contract {contract!r}", suggest(contract, CONTRACTS))
            _check_expectation(expected, self.wrong)
        return dict(expects)

    def _controls(self) -> dict[str, Control]:
        controls = self.given.get("controls")
        write = 'write controls={"no-pin": change(pin="none")} or another that must give the opposite'
        if not isinstance(controls, Mapping) or not controls:
            raise self.wrong("controls", "it has no control, so a verdict would prove nothing", write)
        for name, control in controls.items():
            if not isinstance(name, str) or not _CONTROL_NAME.fullmatch(name):
                raise self.wrong("controls", f"{name!r} is no name for a control", 'write it like "no-pin"')
            if not isinstance(control, (Change, Instead)):
                raise self.wrong("controls", f"control {name!r} is no control", write)
            if isinstance(control, Instead) and control.scenario == self.code.co_name:
                raise self.wrong("controls", f"control {name!r} is the scenario itself", write)
        return dict(controls)

    def _options(self) -> dict[str, Value | tuple[str, ...]]:
        options = self.given.get("options", {})
        if not isinstance(options, Mapping):
            raise self.wrong("options", "options is no mapping", 'write options={"rounds": 10}')
        for option, default in options.items():
            words = isinstance(default, tuple) and default and all(isinstance(one, str) for one in default)
            if not isinstance(option, str) or not option.isidentifier():
                raise self.wrong("options", f"{option!r} is no name for an option", 'write it like "rounds"')
            if not words and not isinstance(default, (bool, int, str)):
                write = "give it true or false, a whole number, Size(…), a word or a tuple of words"
                raise self.wrong("options", f"option {option} has the default {default!r}", write)
        return dict(options)


def _check_expectation(
    expected: Any, wrong: Callable[[str, str, str], ScenarioFileError], *, by_kernel: bool = True
) -> None:
    """Check what a scenario expects under one contract (see `Expectation`)."""

    def check_verdict(verdict: Any) -> None:
        if isinstance(verdict, list):
            raise wrong("expects", f"{verdict!r} is no verdict", 'write {"verdict": […]}')
        if verdict not in EXPECTATIONS:
            raise wrong("expects", f"unknown verdict {verdict!r}", suggest(verdict, EXPECTATIONS))

    if not isinstance(expected, Mapping):
        check_verdict(expected)
        return
    kernels = [key for key in expected if isinstance(key, str) and KERNEL_NEED.fullmatch(key)]
    if kernels and by_kernel:
        if len(kernels) != len(expected):
            what = "expects mixes ranges of kernels with other keys"
            raise wrong("expects", what, 'write {"kernel>=6.5": …, "kernel<6.5": …}')
        for inner in expected.values():
            _check_expectation(inner, wrong, by_kernel=False)
        return
    for key, value in expected.items():
        if key not in EXPECTATION_KEYS:
            known = (*EXPECTATION_KEYS, "kernel>=6.5") if by_kernel else EXPECTATION_KEYS
            raise wrong("expects", f"it cannot expect {key!r}", suggest(key, known))
        words = value if isinstance(value, list) else [value]
        if not words or not all(isinstance(word, str) for word in words):
            raise wrong("expects", f"{key}={value!r} is no word", f'write "{key}": "…" or a list of words')
        if key == "verdict":
            for word in words:
                check_verdict(word)
    if "verdict" not in expected:
        raise wrong("expects", "it expects no verdict", 'write {"verdict": "other-failure", "layer": "mkey"}')


def _plain(expected: Expectation) -> Expectation:
    """Return an expectation as plain dicts and lists, for the record."""
    if isinstance(expected, Mapping):
        return {key: _plain(value) for key, value in expected.items()}
    return expected


def in_words(expected: Expectation) -> str:
    """Return an expectation as a person reads it: `other-failure (mkey, EINVAL)`."""
    if isinstance(expected, str):
        return expected
    if any(KERNEL_NEED.fullmatch(key) for key in expected):
        return " or ".join(f"{in_words(value)} ({key})" for key, value in expected.items())
    said = {key: "/".join(value) if isinstance(value, list) else value for key, value in expected.items()}
    verdict = said.pop("verdict", "")
    return f"{verdict} ({', '.join(said.values())})" if said else verdict


def _check_signature(body: Callable[..., Any], wrong: Callable[..., ScenarioFileError]) -> None:
    if (
        inspect.iscoroutinefunction(body)
        or inspect.isgeneratorfunction(body)
        or inspect.isasyncgenfunction(body)
    ):
        raise wrong(None, "it is async or a generator", f"write a plain function: {SIGNATURE}")
    positional = [
        parameter
        for parameter in inspect.signature(body).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
    ]
    if len(inspect.signature(body).parameters) != 1 or len(positional) != 1:
        raise wrong(None, "it must take one argument, the stage", f"write {SIGNATURE}")


def suggest(word: Any, known: Iterable[str], otherwise: str = "") -> str:
    """Return "did you mean …?" where something known is near, and what is known."""
    import difflib

    names = list(known)
    near = difflib.get_close_matches(str(word), names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    return otherwise or f"known are {', '.join(names)}"


def _caller() -> tuple[str, int]:
    """Return file and line of the code that called into this module."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _keyword_line(code: CodeType, keyword: str | None) -> int:
    """Return the line of a keyword in the decorator of a function; the decorator's own if it is absent."""
    with suppress(OSError, SyntaxError, ValueError):
        tree = ast.parse(Path(code.co_filename).read_bytes())
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name != code.co_name:
                continue
            for decorator in node.decorator_list:
                if decorator.lineno != code.co_firstlineno or not isinstance(decorator, ast.Call):
                    continue
                for argument in decorator.keywords:
                    if argument.arg == keyword:
                        return argument.value.lineno
            if keyword is None:
                return node.lineno
    return code.co_firstlineno
