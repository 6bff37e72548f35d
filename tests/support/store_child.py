"""A process that opens or records, and kills itself (SIGKILL) before its n-th matching statement.

python store_child.py URL SCRIPTS open|record|loop PATTERN N
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event
from store_examples import make_groups

from ludus.store import RunStore
from ludus.store.database import Database
from ludus.store.migrate import MIGRATIONS, migrate


def kill_before(pattern: str, nth: int) -> None:
    seen = 0

    def count(statement: str) -> None:
        nonlocal seen
        seen += bool(re.match(pattern, statement))
        if seen == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    @event.listens_for(Engine, "before_cursor_execute")
    def statement(_connection: Any, _cursor: Any, sql: str, *_: Any) -> None:
        count(sql.strip())

    @event.listens_for(Engine, "commit")
    def commit(_connection: Any) -> None:
        count("COMMIT")


def main(url: str, scripts: str, action: str, pattern: str, nth: str) -> None:
    if action == "open":
        kill_before(pattern, int(nth))
        database = Database(url)
        migrate(database, Path(scripts or MIGRATIONS))
        database.close()
        return
    store = RunStore.open(url)
    kill_before(pattern, int(nth))
    step = 0
    while True:
        store.record_step("run-1", "rl", step % 3, make_groups(step), {"of": step})
        print(step, flush=True)
        if action == "record":
            return
        step += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
