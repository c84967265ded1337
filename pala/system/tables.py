"""Nested tables, as TOML and JSON hold them: flat, or as dataclasses whose every value has its type."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import numbers
import os
import reprlib
import types
import typing
from typing import Any, Literal, TypeVar

from pala.system.errors import PalaError, nearest

T = TypeVar("T")
_MOST_SHOWN = 200
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _MOST_SHOWN


def shown(value: Any) -> str:
    """Return a value as words of an error message, shortened: a file may hold values of any size."""
    return _short.repr(value)


def flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a table with dotted keys: {"a2c": {"gamma": 1}} -> {"a2c.gamma": 1}."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return the table `above` laid over the table `below`, and so for the tables in them."""
    both = [key for key in above if isinstance(above[key], dict) and isinstance(below.get(key), dict)]
    return below | above | {key: merged(below[key], above[key]) for key in both}


def build(cls: type[T], table: dict[str, Any], source: str) -> T:
    """Return a dataclass, with dataclasses in it, from nested dictionaries. Raises PalaError that names the key."""
    return _build(cls, table, source, "", keys(cls))


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Return the types of a class's fields: compiled from text, and a plan of runs asks for them thousands of times."""
    return typing.get_type_hints(cls)


def keys(cls: Any, prefix: str = "") -> list[str]:
    """Return all dotted keys of a dataclass."""
    found: list[str] = []
    for name, hint in _hints(cls).items():
        found += keys(hint, f"{prefix}{name}.") if dataclasses.is_dataclass(hint) else [prefix + name]
    return found


def _build(cls: Any, table: dict[str, Any], source: str, prefix: str, known: list[str]) -> Any:
    hints = _hints(cls)
    unknown = [key for key in table if key not in hints]
    if unknown:
        key = prefix + unknown[0][:_MOST_SHOWN]
        guess = nearest(key, known) or nearest(key, [k for k in known if k.endswith("." + unknown[0])])
        raise PalaError(f"{source}: unknown key '{key}'{guess or '; here are ' + ', '.join(hints) + '.'}")
    values = {key: _convert(value, hints[key], source, prefix + key, known) for key, value in table.items()}
    return cls(**values)


def _convert(value: Any, hint: Any, source: str, key: str, known: list[str]) -> Any:
    """Return `value` as the annotated type. An int is accepted for a float, numpy's numbers for Python's, a path for
    its text; nothing else is coerced."""
    if dataclasses.is_dataclass(hint):
        if isinstance(value, dict):
            return _build(hint, value, source, key + ".", known)
        raise PalaError(f"{source}: '{key}' is a section and needs a table, not {shown(value)}.")
    if hint is Any:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value in arguments:
            return value
        choices = ", ".join(repr(a) for a in arguments)
        guess = nearest(value, arguments) if isinstance(value, str) else ""
        raise PalaError(f"{source}: '{key}' is {shown(value)} but must be one of {choices}{guess}")
    if origin in (types.UnionType, typing.Union):
        return _convert_to_one_of(arguments, value, source, key)
    if origin is dict and isinstance(value, dict):
        return {name: _convert(item, arguments[1], source, f"{key}.{name}", known) for name, item in value.items()}
    if origin is tuple and isinstance(value, (list, tuple)):
        inner = arguments[0]
        if arguments[-1] is not Ellipsis and len(value) != len(arguments):
            raise PalaError(f"{source}: '{key}' needs {len(arguments)} values, not {shown(value)}.")
        return tuple(_convert(item, inner, source, key, known) for item in value)
    if isinstance(value, numbers.Real) and not isinstance(value, int | float):
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1023:
        return float(value)
    if hint is str and isinstance(value, os.PathLike):
        return os.fsdecode(value)
    is_class = origin is None and isinstance(hint, type)
    if is_class and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    wanted = hint.__name__ if is_class else str(hint)
    if origin is tuple and isinstance(value, str):
        wanted += f", as [{value!r}]"
    raise PalaError(f"{source}: '{key}' is {shown(value)} ({type(value).__name__}) but must be of type {wanted}.")


def _convert_to_one_of(hints: tuple[Any, ...], value: Any, source: str, key: str) -> Any:
    """Return `value` if it is of one of these types."""
    for hint in hints:
        with contextlib.suppress(PalaError):
            return _convert(value, hint, source, key, [])
    each = [typing.get_args(hint) if typing.get_origin(hint) is Literal else (hint.__name__,) for hint in hints]
    wanted = " or ".join(str(word) for words in each for word in words)
    raise PalaError(f"{source}: '{key}' is {shown(value)} ({type(value).__name__}) but must be {wanted}.")
