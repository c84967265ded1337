"""Things by the names that they are imported by: `module:name`."""

from __future__ import annotations

import ast
import importlib
import sys
import traceback
from types import ModuleType
from typing import Any

import cloudpickle

from pala.system.errors import PalaError
from pala.system.search_path import find_own_modules


def name_of(thing: object) -> str | None:
    """Return `module:name` if that leads to this very object in other processes, too; otherwise None."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(name, str)) or module == "__main__" or not _may_be_named(module):
        return None
    if not cloudpickle.list_registry_pickle_by_value().isdisjoint({module, module.partition(".")[0]}):
        return None  # its user says that others cannot import it
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is thing else None


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """Return (name, arguments) of `name` or `name(key=value, ...)` with plain values. Raises ValueError."""
    name, bracket, rest = text.partition("(")
    try:
        call = ast.parse(f"f({rest}", mode="eval").body if bracket else ast.Call(ast.Name("f"), [], [])
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args or call.func.id != "f":
            raise ValueError
        if any(keyword.arg is None for keyword in call.keywords):  # **{...}
            raise ValueError
        return name, {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is no name with plain arguments") from None


def named_call(text: str, source: str, forms: str) -> tuple[str, dict[str, Any]]:
    """Return (name, arguments), as `parse_call`. Raises PalaError. `source`: the key that gives the text; `forms`: what
    it may look like."""
    try:
        return parse_call(text)
    except ValueError:
        raise PalaError(f"{source} is '{text}': write {forms}, with plain values.") from None


def import_named(text: str, source: str) -> Any:
    """Return the function or class that `module:name` leads to, outside Python's own modules. `source`: the file or key
    that gives the name, which is trusted. Raises PalaError."""
    module, _, name = text.partition(":")
    parts = name.split(".")
    if not all(part.isidentifier() for part in [*module.split("."), *parts]) or not _may_be_named(module):
        raise PalaError(f"{source} names {text[:100]!r}, which is no function or class of a module, 'module:name'.")
    found: Any = import_module(module, source)
    try:
        for part in parts:
            found = getattr(found, part)
    except AttributeError as error:
        raise cannot_be_loaded(f"{source} names '{text}', which", error) from None
    if not callable(found):
        raise PalaError(f"{source} names '{text}', which is no function or class of that module.")
    return found


def import_module(module: str, source: str) -> ModuleType:
    """Import the module that a file or key, `source`, names; it is trusted. Raises PalaError."""
    find_own_modules()
    what = f"{source} names the module '{module}', which"
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise cannot_be_loaded(what, error) from error
    except Exception as error:  # it is the user's code: anything may happen
        last = traceback.extract_tb(error.__traceback__)[-1]
        file, line = (error.filename, error.lineno) if isinstance(error, SyntaxError) else (last.filename, last.lineno)
        raise PalaError(f"{what} fails in '{file}', line {line}: {type(error).__name__}: {error}.") from error


def cannot_be_loaded(what: str, error: Exception) -> PalaError:
    """Return the error for code that fails when it is imported or unpickled."""
    return PalaError(
        f"{what} cannot be loaded ({type(error).__name__}: {error}); start from where its modules can be imported, or "
        f"install them into '{sys.prefix}'."
    )


def _may_be_named(module: str) -> bool:
    """Return False for Python's own modules: a run needs none of them, and some of their functions do harm."""
    return module.partition(".")[0] not in (*sys.stdlib_module_names, *sys.builtin_module_names)
