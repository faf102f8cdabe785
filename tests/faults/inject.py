# SPDX-License-Identifier: Apache-2.0
"""Faults at named points of real processes, without a hook in the code that is tested.

Every Python process of a run finds, through sitecustomize, a JSON list of `Fault`s in the file that
MOLT_FAULTS names. It wraps the functions in question, in modules that are there already and, with
an import hook, in those that come. A fault strikes once a run, whichever process comes to it first:
it leaves FILE.<index>, with the number of the process, before it does anything.

This module is imported at every start of Python, so it imports next to nothing.
"""

import builtins
import errno
import importlib.util
import inspect
import io
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import wraps
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

ENVIRONMENT, LAUNCHER = "MOLT_FAULTS", "MOLT_LAUNCHER"


@dataclass(frozen=True)
class Fault:
    """What happens where.

    Attributes:
        role: launcher | coordinator | engine | runner | trainer | server.
        at: "module:function" or "module:Class.method".
        do: kill (this process) | kill all (with the launcher, whose death takes everybody) | tear
            (cut the end of the file, then kill all) | stop (SIGSTOP) | hang | the name of an errno
            | mount PATH (this process works in another directory) | jump SECONDS (the clock).
        when: before | after the call; close = when the file that "module:open" opens is closed.
        about: a pattern in what the call is about: the path of a file, or of a route.
        nth: such call of a process, 1 = the first.
        times: how many calls from then on.
        orphan: the process outlives its launcher.
    """

    role: str
    at: str
    do: str
    when: str = "before"
    about: str = ""
    nth: int = 1
    times: int = 1
    orphan: bool = False


def write(path: Path, faults: list[Fault]) -> dict[str, str]:
    """Write faults down; returns the environment that arms them."""
    path.write_text(json.dumps([asdict(fault) for fault in faults]))
    site = Path(__file__).parent / "site"
    paths = f"{site}:{Path(__file__).parents[2]}"
    return {ENVIRONMENT: str(path), "PYTHONPATH": paths}


def struck(path: Path) -> dict[int, int]:
    """Faults that have struck: index → the process they struck."""
    marks = [p for p in path.parent.glob(f"{path.name}.*") if p.suffix[1:].isdigit()]
    return {int(p.suffix[1:]): int(p.read_text() or 0) for p in marks}


def role() -> str:
    """What this process is in a run; "" for any other one."""
    words = sys.orig_argv[1:]
    if "tests.scripted_engine" in words:
        return "server"
    if "molt.cli" not in words:
        return ""
    command = words[words.index("molt.cli") + 1 :]
    if command[:1] == ["role"]:
        return command[1]
    return "launcher" if command[:1] == ["train"] else ""


def install() -> None:
    """Arm the faults of this process's role."""
    path, mine = Path(os.environ[ENVIRONMENT]), role()
    if mine == "launcher":
        os.environ[LAUNCHER] = str(os.getpid())
    wraps_of: dict[str, list[tuple[str, Any]]] = {}
    for index, fields in enumerate(json.loads(path.read_text())):
        fault = Fault(**fields)
        if fault.role == mine:
            trap = Trap(fault, path.with_name(f"{path.name}.{index}"))
            module, _, name = fault.at.partition(":")
            wraps_of.setdefault(module, []).append((name, trap))
            if fault.orphan:
                wraps_of.setdefault("molt.launch.role", []).append(("die_with_parent", _nothing))
    if mine == "runner":
        wraps_of.setdefault("transformers", []).append(("AutoTokenizer", _fast_tokenizer))
    hook = Hook(wraps_of)
    for module in list(wraps_of):
        if module in sys.modules:
            hook.wrap(sys.modules[module])
    sys.meta_path.insert(0, hook)


class Hook:
    """An import hook that wraps functions of modules as they are imported."""

    def __init__(self, wraps_of: dict[str, list[tuple[str, Any]]]) -> None:
        self._wraps_of = wraps_of

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The module's own spec, whose loader wraps what it has loaded."""
        if name not in self._wraps_of:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        assert spec and spec.loader, name
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self.wrap(sys.modules.get(name, module))

        vars(spec.loader)["exec_module"] = exec_module
        return spec

    def wrap(self, module: Any) -> None:
        """Replace the functions."""
        for name, wrapper in self._wraps_of[module.__name__]:
            *outer, last = name.split(".")
            owner = module
            for part in outer:
                owner = getattr(owner, part)
            setattr(owner, last, wrapper(getattr(owner, last, getattr(builtins, last, None))))


class Trap:
    """One fault, around the function that it waits at."""

    def __init__(self, fault: Fault, mark: Path) -> None:
        self._fault, self._mark, self._calls = fault, mark, 0

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self._fault.when == "close":
            return self._opening(function)
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def waiting(*args: Any, **kwargs: Any) -> Any:
                args = self._pass("before", args)
                result = await function(*args, **kwargs)
                self._pass("after", args)
                return result

            return waiting

        @wraps(function)
        def calling(*args: Any, **kwargs: Any) -> Any:
            args = self._pass("before", args)
            result = function(*args, **kwargs)
            self._pass("after", args)
            return result

        return calling

    def _pass(self, side: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A call passes one side of the point; returns its arguments."""
        return self._strike(args) if self._fault.when == side and self._is_hit(args) else args

    def _opening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`open`, whose files strike when they are closed."""
        trap = self

        class File(io.BufferedWriter):
            def close(self) -> None:
                closes = not self.closed
                super().close()
                if closes:
                    trap._strike(())

        def opening(*args: Any, **kwargs: Any) -> Any:
            file = function(*args, **kwargs)
            return File(file.detach()) if self._is_hit(args) else file

        return opening

    def _is_hit(self, args: tuple[Any, ...]) -> bool:
        """Whether this is the call, and nobody was struck before."""
        fault = self._fault
        if not re.search(fault.about, about(args)):
            return False
        self._calls += 1
        if self._calls < fault.nth:
            return False
        if self._calls > fault.nth:
            return self._calls < fault.nth + fault.times
        try:
            with self._mark.open("x") as mark:
                mark.write(str(os.getpid()))
        except FileExistsError:
            self._calls = sys.maxsize // 2
            return False
        return True

    def _strike(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Do it; returns the arguments to go on with."""
        what, _, how = self._fault.do.partition(" ")
        if what == "tear":
            size = os.fstat(args[0]).st_size
            os.ftruncate(args[0], size - min(7, size // 2))
        if self._fault.do in ("kill all", "tear"):
            os.kill(int(os.environ[LAUNCHER]), signal.SIGKILL)
        if what in ("kill", "tear"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif what == "hang":
            time.sleep(3600)
        elif what == "mount":
            return (args[0], Path(how), *args[2:])
        elif what == "jump":
            _jump(float(how))
        else:
            code = getattr(errno, what)
            raise OSError(code, os.strerror(code))
        return args


def about(args: tuple[Any, ...]) -> str:
    """What a call is about: the files and routes in its arguments."""
    found: list[str] = []
    for arg in args:
        if isinstance(arg, int) and not isinstance(arg, bool) and arg > 2:
            link = Path(f"/proc/self/fd/{arg}")
            found += [str(link.readlink())] if link.is_symlink() else []
        elif isinstance(arg, str | Path):
            found.append(str(arg))
        elif isinstance(path := getattr(arg, "path", None), str):
            found.append(path)
    return " ".join(found)


def _jump(seconds: float) -> None:
    """Set the wall clock, as this process sees it."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + int(seconds * 1e9)


def _nothing(_: Any) -> Callable[[], None]:
    return lambda: None


def _fast_tokenizer(_: Any) -> Any:
    """What AutoTokenizer would choose, without the seconds that it takes to import it."""
    return sys.modules["transformers"].PreTrainedTokenizerFast
