"""Scenario files: finding, loading and checking them, and choosing scenarios by name."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from regrepro.errors import UsageError
from regrepro.scenario import declaration
from regrepro.scenario.declaration import SIGNATURE, Instead, Scenario, ScenarioFileError, suggest


def shipped_directory() -> Path:
    """Return where the shipped scenario files lie: `scenarios/` of the checkout, else of the package."""
    package = Path(__file__).resolve().parents[1]
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
    file = Path(path)
    try:
        source = file.read_bytes()
    except OSError as error:
        raise ScenarioFileError(
            file, None, f"cannot be read: {error.strerror or error}", "name a scenario file that you may read"
        ) from None
    if not source.strip():
        raise ScenarioFileError(file, 1, "is empty", f"begin with @scenario(…) over {SIGNATURE}")
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
    try:
        with declaration.collecting() as loaded:
            exec(code, module.__dict__)  # a scenario file is the user's own program
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
    # A file may import scenarios of another; its own are those that were declared in it.
    own = [item for item in loaded if item.file == str(file)]
    if not own:
        raise ScenarioFileError(file, None, "holds no scenario", f"write @scenario(…) over {SIGNATURE}")
    seen: dict[str, Scenario] = {}
    for item in own:
        for name in item.names:
            first = seen.setdefault(name, item)
            if first is not item:
                what = f"{name} is there a second time (first in line {first.line})"
                raise ScenarioFileError(file, item.line, what, "give it another name")
    return own


def _line_in(file: Path, error: BaseException) -> int | None:
    """Return the innermost line of `file` that an exception came through."""
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
                return suggest(wanted[1], names.split(", "), f"regrepro offers {names}")
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

    def by_name(self, name: str, beside: Scenario | None = None) -> list[Scenario]:
        """Return a scenario, or all its variants: of `beside`'s own file, or shipped. Raises `UsageError`.

        `name`: `file` (every variant of it), `file[memfd]` or `file_memfd` (one).
        """
        known: list[str] = []
        # The file of that name first: a run of one scenario need not load the others.
        files = sorted(shipped_files(), key=lambda file: (not name.startswith(file.stem), -len(file.stem)))
        for file in ([Path(beside.file)] if beside is not None else []) + files:
            items = self.load(file)
            if found := _of_name(items, name):
                return found
            known += [word for item in items for word in (item.function, item.name)]
        if beside is not None:
            wrong = f"{beside.name}: instead({name!r}) names no scenario"
            raise ScenarioFileError(beside.file, beside.line, wrong, suggest(name, known))
        hint = suggest(name, known, "`regrepro list` shows them")
        raise UsageError(f"unknown scenario {name!r}", hint=hint)

    def control(self, control: Instead, beside: Scenario) -> Scenario:
        """Return the scenario that a control names. Raises `UsageError`, also where it has variants."""
        found = self.by_name(control.scenario, beside=beside)
        if len(found) > 1:
            wrong = f"{beside.name}: {control.scenario} has {len(found)} variants"
            raise ScenarioFileError(beside.file, beside.line, wrong, f"name one: instead({found[0].name!r})")
        return found[0]

    def select(self, names: Iterable[str], profile: str) -> list[Scenario]:
        """Return the scenarios for names and files given (`FILE` or `FILE:SCENARIO`), else those of a
        profile.

        Raises `UsageError`, also where two of one name would share a record or a control names none.
        """
        wanted = list(names)
        chosen = [item for name in wanted for item in self._named(name)]
        if not wanted:
            chosen = [item for item in self.shipped() if profile in item.profiles]
            if not chosen:
                raise UsageError(f"no scenario is in profile {profile!r}", hint="`regrepro list` shows them")
        unique: dict[str, Scenario] = {}
        for item in chosen:
            other = unique.setdefault(item.names[-1], item)
            if other is not item:
                raise UsageError(
                    f"two scenarios have the name {item.names[-1]}",
                    why=f"{other.file}:{other.line} and {item.file}:{item.line}",
                    hint="run them apart, or rename one",
                )
            for control in item.controls.values():
                if isinstance(control, Instead):
                    self.control(control, beside=item)
        return list(unique.values())

    def _named(self, name: str) -> list[Scenario]:
        path, _, wanted = name.partition(":")
        looks_like_file = path.endswith(".py") or "/" in path or (wanted and Path(path).is_file())
        if not looks_like_file:
            if not name.isidentifier() and Path(name).is_file():
                return self.load(Path(name))
            return self.by_name(name)
        if Path(path).is_dir():
            raise UsageError(f"{path} is a directory", hint=f"name its files: {path.rstrip('/')}/*.py")
        items, wanted = self.load(Path(path)), wanted.lstrip(":")
        if not wanted:
            return items
        if found := _of_name(items, wanted):
            return found
        hint = suggest(wanted, [item.name for item in items])
        raise UsageError(f"{path} holds no scenario {wanted!r}", hint=hint)


def _of_name(items: Iterable[Scenario], name: str) -> list[Scenario]:
    return [item for item in items if name in (item.function, *item.names)]
