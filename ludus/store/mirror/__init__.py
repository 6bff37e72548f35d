"""A run's copy in object storage: the run's folder and its rows of the store, behind a URL.

A machine that has lost its disk goes on from there. See docs/deployment.md.
"""

from ludus.store.mirror.remote import MirrorTaken, Remote, Snapshot
from ludus.store.mirror.sync import RunMirror, take_up

__all__ = ["MirrorTaken", "Remote", "RunMirror", "Snapshot", "take_up"]
