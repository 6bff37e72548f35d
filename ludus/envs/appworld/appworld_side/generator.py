"""Generates a small world, and tasks in it, in the layout of AppWorld's data.

    data/base_dbs/                       people with accounts, money, songs, notes, contacts, alarms
    data/api_docs/standard/              of the engine's own apps
    data/tasks/KIND_SEED/                specs.json, dbs/, ground_truth/ with an expert's solution

The rows come from the engine's own models. A seed gives the same world and tasks on any machine.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from appworld import update_root
from appworld.apps import get_all_apps
from appworld.apps.api_lib import CompanyNotifier, save_local_dbs, set_local_dbs
from appworld.apps.factory_lib import email_from_name
from appworld.apps.model_lib import CachedDBHandler
from appworld.collections.api_docs import ApiDocCollection
from appworld.collections.models import ModelCollection
from appworld.common.constants import DB_VERSION, DEFAULT_SYSTEM_DATETIME
from appworld.common.utils import freeze_time
from appworld.common.utils import import_models_module as models
from faker import Faker

from ludus.envs.appworld.appworld_side.frames import receive, send
from ludus.envs.appworld.appworld_side.kinds import KINDS, Draw

NUM_PEOPLE, NUM_TRAIN_PEOPLE = 12, 8
"""The first people give training tasks, the others held-out ones."""

APPS = ("amazon", "file_system", "gmail", "phone", "simple_note", "splitwise", "spotify", "todoist",
        "venmo")  # fmt: skip
"""Apps with accounts."""

GENRES = ("pop", "rock", "jazz", "folk")
RELATIONS = ("roommate", "manager", "brother", "sister", "neighbour")
ALARMS = {"gym": "06:15", "work": "07:30", "medicine": "21:00"}
BALANCE = 500.0
BASE = ":memory:base"


class Writer:
    """Fills the databases of a world."""

    def __init__(self, seed: int) -> None:
        self._rng, self._fake = random.Random(f"appworld/{seed}"), Faker()
        self._fake.seed_instance(seed)
        random.seed(seed)  # the engine's models draw from it
        self._people: list[Any] = []

    def write(self) -> None:
        """Write all tables."""
        for company in APPS:  # they send codes and receipts
            CompanyNotifier(company).create_accounts(skip_if_exists=True)
        for _ in range(NUM_PEOPLE):
            self._people.append(self._person())
        songs = self._songs()
        for person in self._people:
            others = [other for other in self._people if other is not person]
            self._friends(person, self._rng.sample(others, 7))
            self._library(person, self._rng.sample(songs, 24))
            self._notes(person, others)
            self._phone(person, self._rng.sample(others, len(RELATIONS)))

    def _person(self) -> Any:
        first, last = self._fake.unique.first_name(), self._fake.unique.last_name()
        number = len(self._people)
        person = models("admin").MainUser.create_save(
            first_name=first,
            last_name=last,
            email=email_from_name(first, last),
            phone_number=f"6{self._rng.randrange(10**7):07d}{number:02d}",
            birthday=f"19{self._rng.randint(60, 99)}-0{self._rng.randint(1, 9)}-11",
            sex=self._rng.choice(["male", "female"]),
        )
        for app in APPS:
            password = self._fake.unique.password(length=10, special_chars=False)
            fields = {"email": person.email, "verified": True}
            if app == "phone":
                fields = {"phone_number": person.phone_number}
            if app == "gmail":
                fields.pop("verified")
            if app == "venmo":
                fields["venmo_balance"] = BALANCE
            models(app).User.create_save(
                first_name=first, last_name=last, password=password, **fields
            )
            models("admin").AccountPassword.create_save(
                main_user_id=person.id, account_name=app, password=password
            )
        return person

    def _songs(self) -> list[Any]:
        spotify = models("spotify")
        artists = [
            spotify.Artist.create_save(
                name=self._fake.unique.name(), genre=self._rng.choice(GENRES)
            )
            for _ in range(8)
        ]
        return [
            spotify.Song.create_save(
                title=self._fake.unique.sentence(3).strip("."),
                artist_ids=[self._rng.choice(artists).id],
                duration=self._rng.randint(90, 300),
                release_date=self._past(4000),
                genre=self._rng.choice(GENRES),
            )
            for _ in range(80)
        ]

    def _library(self, person: Any, songs: list[Any]) -> None:
        spotify = models("spotify")
        user = spotify.User.find_one(email=person.email)
        for song in songs:
            spotify.UserLibrarySong.create_save(
                user_id=user.id, song_id=song.id, created_at=self._past(300)
            )

    def _friends(self, person: Any, friends: list[Any]) -> None:
        venmo = models("venmo")
        user = venmo.User.find_one(email=person.email)
        for friend in friends:
            other = venmo.User.find_one(email=friend.email)
            venmo.Friendship.create_save(user_id=user.id, friend_id=other.id)
            for _ in range(self._rng.randint(0, 3)):
                venmo.Transaction.create_save(
                    sender_id=user.id,
                    receiver_id=other.id,
                    amount=float(self._rng.randint(5, 60)),
                    description=self._fake.sentence(3).strip("."),
                    created_at=self._past(200),
                )

    def _notes(self, person: Any, others: list[Any]) -> None:
        notes = models("simple_note")
        user = notes.User.find_one(email=person.email)
        for _ in range(4):
            title, content = self._fake.unique.sentence(4).strip("."), self._fake.paragraph()
            notes.Note.create_save(user_id=user.id, title=title, content=content)
        for occasion in self._rng.sample(["Trip", "Dinner", "Party", "Concert", "Picnic"], 2):
            owed = self._rng.sample(others, self._rng.randint(2, 4))
            lines = [
                f"- {other.first_name} {other.last_name}: ${self._rng.randint(4, 40)}"
                for other in owed
            ]
            title = f"{self._fake.unique.city()} {occasion}"
            content = "I owe, for this:\n" + "\n".join(lines)
            notes.Note.create_save(user_id=user.id, title=title, content=content)

    def _phone(self, person: Any, contacts: list[Any]) -> None:
        phone = models("phone")
        user = phone.User.find_one(phone_number=person.phone_number)
        for relation, other in zip(RELATIONS, contacts, strict=True):
            phone.Contact.create_save(
                user_id=user.id,
                first_name=other.first_name,
                last_name=other.last_name,
                email=other.email,
                phone_number=other.phone_number,
                relationships=[relation],
            )
        for label, time in ALARMS.items():
            phone.Alarm.create_save(user_id=user.id, time=time, label=label, enabled=True)

    def _past(self, max_days: int) -> Any:
        return DEFAULT_SYSTEM_DATETIME.subtract(days=self._rng.randint(1, max_days))


@contextmanager
def frozen() -> Iterator[None]:
    """The engine's own time, and no databases left open."""
    freezer = freeze_time(DEFAULT_SYSTEM_DATETIME)
    freezer.start()
    try:
        yield
    finally:
        freezer.stop()
        CachedDBHandler.reset()


@contextmanager
def written(folder: Path) -> Iterator[Path]:
    """A folder to fill, which then gets its name; another process may have been first."""
    aside = folder.with_name(f".{folder.name}-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        with suppress(OSError):
            aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_world(root: str, seed: int) -> None:
    """Write a world's base databases and API docs below `root`, in `data`."""
    with written(Path(root)) as aside, frozen():
        update_root(str(aside))
        data, apps = aside / "data", get_all_apps()
        docs = ApiDocCollection.build(load_apps=tuple(app for app in apps if app != "admin"))
        folder = data / "api_docs" / "standard"
        folder.mkdir(parents=True)
        for (
            app,
            by_name,
        ) in docs.items():  # the engine's reader drops the canary, so it has to exist
            marked = {name: {**doc, "canary_string": ""} for name, doc in by_name.items()}
            (folder / f"{app}.json").write_text(json.dumps(marked))
        set_local_dbs(BASE, BASE, apps, create=True)
        fields = ("app_name", "api_name", "path", "method", "description", "parameters",
                  "response_schemas")  # fmt: skip
        for by_name in docs.values():
            for doc in by_name.values():
                row = {name: doc[name] for name in fields}
                row["app_name_"] = row.pop("app_name")
                models("api_docs").ApiDoc.create_save(**row)
        Writer(seed).write()
        save_local_dbs(
            BASE, str(data / "base_dbs"), "full", list(apps), True, save_model_hashes=True
        )


def write_task(root: str, task: str, kind: str, unseen: bool, seed: int) -> None:
    """Write a task's folder below `root`."""
    update_root(root)
    data, apps = Path(root) / "data", get_all_apps()
    with written(data / "tasks" / task) as aside, frozen():
        home = f":memory:new-{task}"
        ModelCollection.load(
            to_db_home_path=home, from_db_home_path=str(data / "base_dbs"), load_apps=list(apps)
        )
        people = models("admin").MainUser.all()
        part = people[NUM_TRAIN_PEOPLE:] if unseen else people[:NUM_TRAIN_PEOPLE]
        rng = random.Random(f"{task}/{seed}")
        me = rng.choice(part)
        made = KINDS[kind].make(Draw(rng, me, people))
        supervisor = models("supervisor")
        boss = supervisor.Supervisor.create_save(
            **{name: getattr(me, name) for name in (*SPECS, "birthday", "sex")}
        )
        for row in list(me.account_passwords):
            supervisor.AccountPassword.create_save(
                supervisor_id=boss.id, account_name=row.account_name, password=row.password
            )
        supervisor.Task.create_save(supervisor_id=boss.id, instruction=made.instruction)
        save_local_dbs(
            home, str(aside / "dbs"), "changes", list(apps), True, save_model_hashes=True
        )
        specs = {
            "instruction": made.instruction,
            "supervisor": {name: getattr(me, name) for name in SPECS},
            "datetime": DEFAULT_SYSTEM_DATETIME.isoformat(),
            "db_version": DB_VERSION,
        }
        (aside / "specs.json").write_text(json.dumps(specs))
        _write_truth(aside / "ground_truth", made, KINDS[kind].difficulty)


SPECS = ("first_name", "last_name", "email", "phone_number")


def _write_truth(folder: Path, made: Any, difficulty: int) -> None:
    folder.mkdir()
    metadata = {
        "mode": "minimal",
        "difficulty": difficulty,
        "num_apps": 1,
        "num_apis": 1,
        "num_api_calls": 1,
        "num_solution_code_lines": 1,
    }
    for name, value in {
        "metadata": metadata,
        "public_data": {},
        "private_data": {"changes": made.changes},
        "answer": made.answer,
        "test_data": None,
        "expert": made.solution,
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    shutil.copy(Path(__file__).with_name("evaluation.py"), folder)


def serve_generator(host: socket.socket) -> None:
    """Serve the host until it closes the socket."""
    write: dict[str, Callable[..., None]] = {"world": write_world, "task": write_task}
    with suppress(EOFError):
        while host.recv(1):
            request = receive(host)
            try:
                write[request.pop("op")](**request)
                send(host, {"ok": None})
            except Exception as error:
                send(host, {"error": f"{type(error).__name__}: {error}"})
