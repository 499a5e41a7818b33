"""Scenario files: the declaration (`scenario`, `change`, `instead`), and finding, loading and checking of
files.

A scenario is a function of one argument, the stage. Its declaration says what it needs, what it expects and
which controls it has. Every mistake in a file ends in a `ScenarioFileError`: one line, `file:line: what is
wrong; what to write instead`.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
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

_KEYWORDS = ("shows", "needs", "expects", "controls", "profiles", "timeout", "options")
_SIGNATURE = "def NAME(stage: Stage) -> None:"


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
    """A scenario as declared. Calling it runs its body."""

    name: str
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
        }

    def option_values(self, given: Iterable[str]) -> dict[str, Value]:
        """Return the value of each option that this scenario declares: of `given`, else its default.

        `given`: `NAME=VALUE`, or `SCENARIO.NAME=VALUE` for one scenario alone; what names no option of this
        scenario is another's. Raises `UsageError` for a value that does not fit.
        """
        values: dict[str, Value] = {
            name: default[0] if isinstance(default, tuple) else default
            for name, default in self.options.items()
        }
        for item in given:
            name, text = _split_option(item)
            owner, _, own = name.rpartition(".")
            if owner in ("", self.name) and own in self.options:
                values[own] = _option_value(f"--option {name}", text, self.options[own])
        return values

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
            file, line, f"change() knows no variable {name!r}", _suggest(name, CHANGES, f"write {choices}")
        )
    if value not in CHANGES[name]:
        raise ScenarioFileError(
            file, line, f"change({name}={value!r}) is not known", _suggest(value, CHANGES[name])
        )
    return Change(name, value)


def instead(scenario: str) -> Instead:
    """Make a control that is another scenario: `instead("no_pin")`."""
    if not isinstance(scenario, str) or not scenario.isidentifier():
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
        return _size_of(what, text)
    if isinstance(default, int):
        if not re.fullmatch(r"[0-9]{1,18}", text):
            raise UsageError(
                f"{what}={text} is no whole number", hint=f"write digits, such as {what}={default}"
            )
        return int(text)
    if isinstance(default, tuple) and text not in default:
        raise UsageError(f"{what}={text} is not known", hint=_suggest(text, default))
    return text


def _size_of(what: str, text: str) -> int:
    if text == "0":
        return 0
    try:
        return parse_size(text)
    except UsageError:
        raise UsageError(
            f"{what}={text} is no size", hint=f"write a number with K, M, G or T, such as {what}=4M"
        ) from None


def check_options(scenarios: Iterable[Scenario], given: Iterable[str]) -> None:
    """Check that each given option is one of these scenarios' and fits it. Raises `UsageError`."""
    chosen, items = list(scenarios), list(given)
    for item in items:
        name, _ = _split_option(item)
        owner, _, own = name.rpartition(".")
        known = {option for one in chosen if owner in ("", one.name) for option in one.options}
        if own not in known:
            raise UsageError(
                f"--option {name} is no option of the scenarios that run",
                hint=_suggest(own, known, "`regrepro list` shows the options of each")
                if known
                else "`regrepro list` shows the options of each",
            )
    for one in chosen:
        one.option_values(items)


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
    `stage.option(NAME)` reads one, `--option` sets it.
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
        made = _declare(body, declaration)
        if _loading is not None:
            _loading.append(made)
        return made

    return declare


def _declare(body: Callable[[Stage], None], given: Mapping[str, Any]) -> Scenario:
    """Check a declaration and make the scenario. Raises `ScenarioFileError`."""
    code: CodeType | None = getattr(body, "__code__", None)
    if code is None:
        file, line = _caller()
        raise ScenarioFileError(file, line, "@scenario stands over no function", f"write {_SIGNATURE}")
    file, name = code.co_filename, body.__name__

    def wrong(keyword: str | None, what: str, write: str) -> ScenarioFileError:
        return ScenarioFileError(file, _keyword_line(code, keyword), f"{name}: {what}", write)

    for keyword in given:
        if keyword not in _KEYWORDS:
            raise wrong(keyword, f"@scenario knows no {keyword!r}", _suggest(keyword, _KEYWORDS))
    _check_signature(body, wrong)

    shows = given.get("shows")
    if not isinstance(shows, str) or not shows.strip():
        raise wrong(
            "shows", "shows is missing", 'say which part of the write-up it shows: shows="section 13"'
        )

    needs = _names(given.get("needs", ()))
    if needs is None:
        raise wrong("needs", "needs is no list of words", 'write needs=("root", "unpinnable", "registrar")')
    for need in needs:
        if need not in NEEDS and not KERNEL_NEED.fullmatch(need):
            raise wrong("needs", f"unknown need {need!r}", _suggest(need, (*NEEDS, "kernel>=5.13")))

    expects = given.get("expects")
    if not isinstance(expects, Mapping) or not expects:
        raise wrong(
            "expects",
            "expects is missing",
            'write the verdict for each contract of the pin: expects={"pin": "reproduced"}',
        )
    for contract, expected in expects.items():
        if contract not in CONTRACTS:
            raise wrong("expects", f"unknown contract {contract!r}", _suggest(contract, CONTRACTS))
        _check_expectation(expected, wrong)

    controls = given.get("controls")
    write_control = 'write controls={"no-pin": change(pin="none")} or another that must give the opposite'
    if not isinstance(controls, Mapping) or not controls:
        raise wrong("controls", "it has no control, so a verdict would prove nothing", write_control)
    for control_name, control in controls.items():
        if not isinstance(control_name, str) or not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", control_name):
            raise wrong("controls", f"{control_name!r} is no name for a control", 'write it like "no-pin"')
        if not isinstance(control, (Change, Instead)):
            raise wrong("controls", f"control {control_name!r} is no control", write_control)
        if isinstance(control, Instead) and control.scenario == name:
            raise wrong("controls", f"control {control_name!r} is the scenario itself", write_control)

    profiles = _names(given.get("profiles", ("default",)))
    if profiles is None:
        raise wrong("profiles", "profiles is no list of words", 'write profiles=("default",)')
    for profile in profiles:
        if profile not in PROFILES:
            raise wrong("profiles", f"unknown profile {profile!r}", _suggest(profile, PROFILES))

    timeout = given.get("timeout", 60)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= MAX_TIMEOUT:
        raise wrong("timeout", f"timeout={timeout!r} is no time", "write seconds, such as timeout=60")

    options = given.get("options", {})
    if not isinstance(options, Mapping):
        raise wrong("options", "options is no mapping", 'write options={"rounds": 10}')
    for option, default in options.items():
        words = isinstance(default, tuple) and default and all(isinstance(word, str) for word in default)
        if not isinstance(option, str) or not option.isidentifier():
            raise wrong("options", f"{option!r} is no name for an option", 'write it like "rounds"')
        if not words and not isinstance(default, (bool, int, str)):
            raise wrong(
                "options",
                f"option {option} has the default {default!r}",
                "give it true or false, a whole number, Size(…), a word or a tuple of words",
            )

    summary = (inspect.getdoc(body) or "").strip().split("\n")[0]
    if not summary:
        raise wrong(None, "it has no docstring", "say in one line what it does: `regrepro list` shows it")
    return Scenario(
        name=name,
        summary=summary,
        file=file,
        line=code.co_firstlineno,
        shows=shows.strip(),
        needs=needs,
        expects=dict(expects),
        controls=dict(controls),
        profiles=profiles,
        timeout=timeout,
        body=body,
        options=dict(options),
    )


def _check_expectation(
    expected: Any, wrong: Callable[[str, str, str], ScenarioFileError], *, by_kernel: bool = True
) -> None:
    """Check what a scenario expects under one contract (see `Expectation`)."""

    def check_verdict(verdict: Any) -> None:
        if isinstance(verdict, list):
            raise wrong("expects", f"{verdict!r} is no verdict", 'write {"verdict": […]}')
        if verdict not in EXPECTATIONS:
            raise wrong("expects", f"unknown verdict {verdict!r}", _suggest(verdict, EXPECTATIONS))

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
            raise wrong("expects", f"it cannot expect {key!r}", _suggest(key, known))
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
        raise wrong(None, "it is async or a generator", f"write a plain function: {_SIGNATURE}")
    positional = [
        parameter
        for parameter in inspect.signature(body).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
    ]
    if len(inspect.signature(body).parameters) != 1 or len(positional) != 1:
        raise wrong(None, "it must take one argument, the stage", f"write {_SIGNATURE}")


def _names(value: Any) -> tuple[str, ...] | None:
    """Return a list or tuple of words as a tuple; None for all else (a lone word, too: a common slip)."""
    if isinstance(value, (tuple, list)) and all(isinstance(item, str) for item in value):
        return tuple(value)
    return None


def _suggest(word: Any, known: Iterable[str], otherwise: str = "") -> str:
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
    import ast

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


def shipped_directory() -> Path:
    """Return where the shipped scenario files lie: `scenarios/` of the checkout, else of the package."""
    package = Path(__file__).resolve().parent
    checkout = package.parent.parent
    # Only an in-place or editable checkout has the package under src/ beside scenarios/ and pyproject.toml.
    if package.parent.name == "src" and (checkout / "pyproject.toml").is_file():
        return checkout / "scenarios"
    return package / "_scenarios"


def shipped_files() -> list[Path]:
    """Return the shipped scenario files, by name; files that begin with `_` hold no scenario."""
    return sorted(file for file in shipped_directory().rglob("*.py") if not file.name.startswith("_"))


def load_file(path: str | Path) -> list[Scenario]:
    """Load and check one scenario file. Raises `ScenarioFileError` for whatever is wrong with it."""
    global _loading  # noqa: PLW0603 - decorators have no other way to reach the load they belong to
    file = Path(path)
    try:
        source = file.read_bytes()
    except OSError as error:
        raise ScenarioFileError(
            file, None, f"cannot be read: {error.strerror or error}", "name a scenario file that you may read"
        ) from None
    if not source.strip():
        raise ScenarioFileError(file, 1, "is empty", f"begin with @scenario(…) over {_SIGNATURE}")
    try:
        code = compile(source, str(file), "exec", dont_inherit=True)
    except SyntaxError as error:
        text = (error.text or "").strip()
        wrong = f"{error.msg}{f' in {text!r}' if text else ''}"
        raise ScenarioFileError(file, error.lineno, wrong, "mend the Python there") from None
    except ValueError as error:  # a NUL byte, on older Pythons
        raise ScenarioFileError(file, None, f"is no Python: {error}", "name a scenario file") from None
    module = ModuleType(f"regrepro_scenario_{file.stem}")
    module.__file__ = str(file)
    previous, _loading = _loading, []
    try:
        exec(code, module.__dict__)  # a scenario file is the user's own program
        loaded = _loading
    except ScenarioFileError:
        raise
    except (Exception, SystemExit) as error:
        line = _line_in(file, error)
        text = " ".join(str(error).split())
        raise ScenarioFileError(
            file,
            line,
            f"{type(error).__name__}{f': {text}' if text else ''}",
            _advice(error),
        ) from None
    finally:
        _loading = previous
    # A file may import scenarios of another; its own are those that were declared in it.
    own = [item for item in loaded if item.file == str(file)]
    if not own:
        raise ScenarioFileError(file, None, "holds no scenario", f"write @scenario(…) over {_SIGNATURE}")
    seen: dict[str, Scenario] = {}
    for item in own:
        if item.name in seen:
            raise ScenarioFileError(
                file,
                item.line,
                f"{item.name} is there a second time (first in line {seen[item.name].line})",
                "give it another name",
            )
        seen[item.name] = item
    return own


def _line_in(file: Path, error: BaseException) -> int | None:
    """Return the innermost line of `file` that an exception came through."""
    import traceback

    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)
    ]
    return lines[-1] if lines else None


def _advice(error: BaseException) -> str:
    if isinstance(error, ImportError):
        names = "Stage, change, instead, scenario"
        if error.name == "regrepro":
            wanted = re.search(r"cannot import name '(\w+)'", str(error))
            if wanted:
                return _suggest(wanted[1], names.split(", "), f"regrepro offers {names}")
        return f"import only what is installed; from regrepro come {names}"
    if isinstance(error, NameError):
        return "import or define it first (from regrepro import Stage, change, instead, scenario)"
    return "the file must load without errors; what a scenario does belongs into its function"


class Library:
    """Finds scenarios by name or file, and the scenarios that controls name. Loads each file once."""

    def __init__(self) -> None:
        self._files: dict[Path, list[Scenario]] = {}

    def load(self, file: Path) -> list[Scenario]:
        """Load a file once."""
        key = file.resolve()
        if key not in self._files:
            self._files[key] = load_file(file)
        return self._files[key]

    def shipped(self) -> list[Scenario]:
        """Return every shipped scenario, sorted by file and place within it."""
        return [item for file in shipped_files() for item in self.load(file)]

    def by_name(self, name: str, beside: Scenario | None = None) -> Scenario:
        """Return one scenario: of `beside`'s own file, or a shipped one. Raises `UsageError`."""
        known: list[str] = []
        if beside is not None:
            for item in self.load(Path(beside.file)):
                if item.name == name:
                    return item
                known.append(item.name)
        files = shipped_files()
        # The file of that name first: a run of one scenario need not load the others.
        for file in sorted(files, key=lambda candidate: candidate.stem != name):
            for item in self.load(file):
                if item.name == name:
                    return item
                known.append(item.name)
        if beside is not None:
            raise ScenarioFileError(
                beside.file,
                beside.line,
                f"{beside.name}: instead({name!r}) names no scenario",
                _suggest(name, known),
            )
        hint = _suggest(name, known, "`regrepro list` shows them")
        raise UsageError(f"unknown scenario {name!r}", hint=hint)

    def select(self, names: Iterable[str], profile: str) -> list[Scenario]:
        """Return the scenarios for names and files given (`FILE` or `FILE:SCENARIO`), else those of a
        profile.

        Raises `UsageError`, also where two of one name would share a record or a control names none.
        """
        chosen: list[Scenario] = []
        wanted = list(names)
        if not wanted:
            chosen = [item for item in self.shipped() if profile in item.profiles]
            if not chosen:
                raise UsageError(f"no scenario is in profile {profile!r}", hint="`regrepro list` shows them")
        for name in wanted:
            chosen += self._named(name)
        unique: dict[str, Scenario] = {}
        for item in chosen:
            other = unique.setdefault(item.name, item)
            if other is not item:
                raise UsageError(
                    f"two scenarios have the name {item.name}",
                    why=f"{other.file}:{other.line} and {item.file}:{item.line}",
                    hint="run them apart, or rename one",
                )
        for item in unique.values():
            for control in item.controls.values():
                if isinstance(control, Instead):
                    self.by_name(control.scenario, beside=item)
        return list(unique.values())

    def _named(self, name: str) -> list[Scenario]:
        path, _, wanted = name.partition(":")
        looks_like_file = path.endswith(".py") or "/" in path or (wanted and Path(path).is_file())
        if not looks_like_file:
            if not name.isidentifier() and Path(name).is_file():
                return self.load(Path(name))
            return [self.by_name(name)]
        if Path(path).is_dir():
            raise UsageError(f"{path} is a directory", hint=f"name its files: {path.rstrip('/')}/*.py")
        items = self.load(Path(path))
        if not wanted:
            return items
        for item in items:
            if item.name == wanted.lstrip(":"):
                return [item]
        hint = _suggest(wanted.lstrip(":"), [item.name for item in items])
        raise UsageError(f"{path} holds no scenario {wanted.lstrip(':')!r}", hint=hint)
