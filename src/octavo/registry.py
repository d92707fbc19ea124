"""Explicit tables `name -> "module:attribute"`, imported on use.

Adding a model, a backend or a policy is one file and one line in such a table. A name that is not in the table may be
given as `package.module:Attribute`, so that users can bring their own without touching ours.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from octavo.errors import ConfigError


class Registry:
    """A read-only table of things that are imported only when asked for.

    >>> Registry("number", {"pi": "math:pi"}).load("pi") > 3
    True
    """

    def __init__(self, kind: str, table: Mapping[str, str]) -> None:
        self.kind = kind
        self._table = dict(table)

    def names(self) -> list[str]:
        """The known names, sorted."""
        return sorted(self._table)

    def __contains__(self, name: str) -> bool:
        return name in self._table

    def load(self, name: str) -> Any:
        """Import and return what `name` stands for.

        Raises ConfigError if the name is unknown or the attribute cannot be imported.
        """
        target = self._table.get(name, name if ":" in name else None)
        if target is None:
            raise ConfigError(
                f"unknown {self.kind} {name!r}; known: {', '.join(self.names())}, or give module:Attribute"
            )
        module, _, attribute = target.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        # Besides what is not there: an empty or relative module name, and a module that is no Python.
        except (ImportError, AttributeError, ValueError, TypeError, SyntaxError) as e:
            hint = "" if name in self._table else "; modules of your own are found through PYTHONPATH"
            raise ConfigError(f"cannot load {self.kind} {name!r} from {target}: {e}{hint}") from e

    def make(self, name: str, interface: type) -> Any:
        """Load what `name` stands for and make one, without arguments.

        interface: the protocol that it must offer; only names are compared.
        Raises ConfigError as `load` does, and for what cannot be made so or lacks a part of the interface.
        """
        try:
            made = self.load(name)()
        except TypeError as e:
            raise ConfigError(f"{self.kind} {name!r} cannot be made without arguments: {e}") from e
        wanted = {*interface.__annotations__, *vars(interface)}
        lacking = sorted(part for part in wanted if not part.startswith("_") and not hasattr(made, part))
        if lacking:
            raise ConfigError(f"{name!r} is no {self.kind}: it lacks {', '.join(lacking)}")
        return made
