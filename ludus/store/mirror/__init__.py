"""A run's copy in object storage: the run's folder and its rows in the store.

A machine that lost its disk continues from the copy. See docs/deployment.md.
"""

from ludus.store.mirror.remote import MirrorTaken, Remote, Snapshot
from ludus.store.mirror.sync import RunMirror, fetch_run

__all__ = ["MirrorTaken", "Remote", "RunMirror", "Snapshot", "fetch_run"]
