"""Copies of generated levels: reading one back takes a fifth of the time of a generation.

A level is kept as a pickle. What episodes never change is shared and not copied: walls, which are
all alike, and gymnasium's descriptions of actions and observations.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from gymnasium import Space
from minigrid.core.world_object import Wall

MAX_BYTES = 32_000_000
"""Limit of all pickles; a level of one room takes 2 kB."""

_WALL = Wall()


class Copies:
    """Levels by key; the least recently used are dropped. Safe to use from several threads."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._pickles: OrderedDict[Hashable, tuple[bytes, list[Any]]] = OrderedDict()
        self._spaces: dict[tuple[type, int], Any] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Any:
        """Returns a new copy of the level, or None."""
        with self._lock:
            kept = self._pickles.get(key)
            if kept is None:
                return None
            self._pickles.move_to_end(key)
        return _Reader(*kept).load()

    def keep(self, key: Hashable, level: Any) -> None:
        """Keep the level as it is now; does nothing for a level that cannot be pickled."""
        file = io.BytesIO()
        writer = _Writer(file, type(level), self._spaces)
        try:
            writer.dump(level)
        except (pickle.PicklingError, AttributeError, TypeError):
            return
        data = file.getvalue()
        with self._lock:
            if key in self._pickles:  # by another thread
                return
            self._pickles[key] = data, writer.shared
            self._num_bytes += len(data)
            while self._num_bytes > self._max_bytes:
                _, (oldest, _) = self._pickles.popitem(last=False)
                self._num_bytes -= len(oldest)


class _Writer(pickle.Pickler):
    """Writes a level; `shared` are the objects that its copies share."""

    def __init__(self, file: Any, level: type, spaces: dict[tuple[type, int], Any]) -> None:
        super().__init__(file, protocol=5)
        self.shared: list[Any] = [_WALL]
        self._level, self._spaces = level, spaces
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is Wall and vars(obj) == vars(_WALL):
            return 0
        if isinstance(obj, Space):
            if id(obj) not in self._places:
                self._places[id(obj)] = len(self.shared)
                # The spaces of all instances of a class are equal: the first one's stand for all.
                self.shared.append(self._spaces.setdefault((self._level, len(self.shared)), obj))
            return self._places[id(obj)]
        return None


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, shared: list[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self.persistent_load = shared.__getitem__  # type: ignore[method-assign]
