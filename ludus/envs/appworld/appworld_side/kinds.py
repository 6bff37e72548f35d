"""Kinds of generated tasks: an instruction, the expected changes, and an expert's code."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from appworld.common.utils import import_models_module as models

WORDS = ("thanks", "lunch", "tickets", "groceries", "taxi", "coffee", "books", "rent", "gift",
         "parking")  # fmt: skip


@dataclass(frozen=True)
class Draw:
    """The person who gives the task, all people of the world, and a random generator."""

    rng: random.Random
    me: Any
    people: Sequence[Any]

    def user(self, app: str, person: Any = None) -> Any:
        """A person's account; by default that of the person who gives the task."""
        person = person or self.me
        key = "phone_number" if app == "phone" else "email"
        return models(app).User.find_one(**{key: getattr(person, key)})

    def other(self) -> Any:
        """Another person."""
        return self.rng.choice([person for person in self.people if person.id != self.me.id])

    def words(self, number: int = 2) -> str:
        """A few words, for a note or a title."""
        return " ".join(self.rng.sample(WORDS, number)).capitalize()


@dataclass(frozen=True)
class Made:
    """A task. `changes`: table to the rows `added`, `updated`, `removed`, each with the fields
    that it has to have; `solution`: an expert's code, step by step."""

    instruction: str
    solution: Sequence[str]
    answer: Any = None
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """A kind of tasks; `held_out` kinds are in no training task."""

    make: Callable[[Draw], Made]
    difficulty: int
    held_out: bool = False


KINDS: dict[str, Kind] = {}


def kind(name: str, difficulty: int, held_out: bool = False) -> Callable[..., Any]:
    """Register a kind by its name, which has no `_`."""

    def register(make: Callable[[Draw], Made]) -> Callable[[Draw], Made]:
        KINDS[name] = Kind(make, difficulty, held_out)
        return make

    return register


# Code that experts share

DONE = "apis.supervisor.complete_task()"


def login(*apps: str) -> str:
    """Code that signs in; the access tokens get the apps' names."""
    lines = [
        "profile = apis.supervisor.show_profile()",
        "accounts = apis.supervisor.show_account_passwords()",
        'passwords = {row["account_name"]: row["password"] for row in accounts}',
    ]
    for app in apps:
        name = "phone_number" if app == "phone" else "email"
        lines.append(
            f'{app} = apis.{app}.login(username=profile["{name}"], '
            f'password=passwords["{app}"])["access_token"]'
        )
    return "\n".join(lines)


def pages(call: str, into: str) -> str:
    """Code that reads all pages of an API."""
    return (
        f"{into}, page = [], 0\n"
        f"while rows := {call}, page_index=page, page_limit=20):\n"
        f"    {into}, page = {into} + rows, page + 1"
    )


LIBRARY = pages("apis.spotify.show_song_library(access_token=spotify", "songs")
PEOPLE = pages('apis.venmo.search_users(access_token=venmo, query=""', "people")
CONTACTS = pages("apis.phone.search_contacts(access_token=phone", "contacts")
BY_NAME = 'emails = {p["first_name"] + " " + p["last_name"]: p["email"] for p in people}'


def _named(person: Any) -> str:
    return f"{person.first_name} {person.last_name}"


def _payment(receiver: str, amount: str, text: str) -> str:
    """Code that pays on Venmo, as the last call of a task."""
    return (
        f"apis.venmo.create_transaction(receiver_email={receiver}, amount={amount}, "
        f"description={text!r}, access_token=venmo)\n{DONE}"
    )


def _paid(draw: Draw, payments: Sequence[tuple[Any, float, str]]) -> dict[str, Any]:
    """Changes of payments from the account of the person who gives the task."""
    me = draw.user("venmo")
    added, told, updated, spent = [], [], [], 0.0
    for person, amount, text in payments:
        other = draw.user("venmo", person)
        row = {"sender_id": me.id, "receiver_id": other.id, "amount": amount, "description": text}
        added.append({"row": row})
        told.append({"row": {"user_id": other.id}})
        balance = other.venmo_balance + amount
        updated.append({"row": {"id": other.id, "venmo_balance": balance}, "fields": MONEY})
        spent += amount
    balance = me.venmo_balance - spent
    updated.append({"row": {"id": me.id, "venmo_balance": balance}, "fields": MONEY})
    return {
        "venmo.Transaction": {"added": added},
        "venmo.Notification": {"added": told},
        "venmo.User": {"updated": updated},
    }


MONEY = ["venmo_balance"]


def _by_artist(draw: Draw) -> tuple[Any, list[Any]]:
    """An artist, and the artist's songs in the library; sorted, so a seed gives the same ones."""
    library = [row.song for row in draw.user("spotify").user_library_songs]
    numbers = sorted({song.artist_ids[0] for song in library})
    number = draw.rng.choice(numbers)
    artist = models("spotify").Artist.find_one(id=number)
    return artist, [song for song in library if number in song.artist_ids]


def _of_artist(name: str) -> str:
    return f'mine = [song for song in songs if any(a["name"] == {name!r} for a in song["artists"])]'


# Easy: one app


@kind("song-count", 1)
def _song_count(draw: Draw) -> Made:
    artist, songs = _by_artist(draw)
    return Made(
        f"How many songs by {artist.name} are in my Spotify song library?",
        [
            f"{login('spotify')}\n{LIBRARY}\nprint(len(songs))\nprint(songs[0])",
            f"{_of_artist(artist.name)}\napis.supervisor.complete_task(answer=len(mine))",
        ],
        answer=len(songs),
    )


@kind("note-delete", 1)
def _note_delete(draw: Draw) -> Made:
    note = draw.rng.choice(draw.user("simple_note").notes)
    find = f"apis.simple_note.search_notes(access_token=simple_note, query={note.title!r})"
    return Made(
        f'Delete the note titled "{note.title}" from my Simple Note account.',
        [
            f"{login('simple_note')}\nnotes = {find}\nprint(notes)",
            f'number = [n["note_id"] for n in notes if n["title"] == {note.title!r}][0]\n'
            "apis.simple_note.delete_note(note_id=number, access_token=simple_note)\n" + DONE,
        ],
        changes={"simple_note.Note": {"removed": [{"row": {"id": note.id}}]}},
    )


@kind("note-add", 1)
def _note_add(draw: Draw) -> Made:
    title, content = draw.words(3), f"{draw.words(4)}."
    row = {"user_id": draw.user("simple_note").id, "title": title, "content": content}
    return Made(
        f'Add a note to my Simple Note account: the title is "{title}", the content "{content}"',
        [
            login("simple_note")
            + '\nprint(apis.api_docs.show_api_doc(app_name="simple_note", api_name="create_note"))',
            f"apis.simple_note.create_note(title={title!r}, content={content!r}, "
            f"access_token=simple_note)\n{DONE}",
        ],
        changes={"simple_note.Note": {"added": [{"row": row}]}},
    )


@kind("alarm-off", 1, held_out=True)
def _alarm_off(draw: Draw) -> Made:
    alarm = draw.rng.choice(draw.user("phone").alarms)
    return Made(
        f'Switch off the alarm labelled "{alarm.label}" on my phone, but keep it.',
        [
            f"{login('phone')}\nalarms = apis.phone.show_alarms(access_token=phone)\nprint(alarms)",
            f'number = [a["alarm_id"] for a in alarms if a["label"] == {alarm.label!r}][0]\n'
            "apis.phone.update_alarm(alarm_id=number, enabled=False, access_token=phone)\n" + DONE,
        ],
        changes={
            "phone.Alarm": {
                "updated": [{"row": {"id": alarm.id, "enabled": False}, "fields": ["enabled"]}]
            }
        },
    )


# Medium: one app, several calls


@kind("pay", 2)
def _pay(draw: Draw) -> Made:
    other, amount, text = draw.other(), float(draw.rng.randint(3, 60)), draw.words()
    return Made(
        f'Send ${amount:.0f} to {_named(other)} on Venmo, with the note "{text}".',
        [
            f"{login('venmo')}\n{PEOPLE}\n{BY_NAME}\nprint(emails)",
            _payment(f"emails[{_named(other)!r}]", f"{amount:.0f}", text),
        ],
        changes=_paid(draw, [(other, amount, text)]),
    )


@kind("like", 2)
def _like(draw: Draw) -> Made:
    artist, songs = _by_artist(draw)
    me = draw.user("spotify")
    return Made(
        f"Like all songs by {artist.name} that are in my Spotify song library.",
        [
            f"{login('spotify')}\n{LIBRARY}\n{_of_artist(artist.name)}\nprint(mine)",
            "for song in mine:\n"
            '    apis.spotify.like_song(song_id=song["song_id"], access_token=spotify)\n' + DONE,
        ],
        changes={
            "spotify.Song": {
                "updated": [{"row": {"id": song.id}, "fields": ["like_count"]} for song in songs]
            },
            "spotify.SongLike": {
                "added": [{"row": {"user_id": me.id, "song_id": song.id}} for song in songs]
            },
        },
    )


@kind("spent", 2)
def _spent(draw: Draw) -> Made:
    me = draw.user("venmo")
    sent: dict[int, float] = {}
    for row in models("venmo").Transaction.find_all(sender_id=me.id):
        sent[row.receiver_id] = sent.get(row.receiver_id, 0.0) + row.amount
    number = draw.rng.choice(sorted(sent))
    other = models("venmo").User.find_one(id=number)
    rows = pages(
        f"apis.venmo.show_transactions(access_token=venmo, user_email=emails[{_named(other)!r}]",
        "found",
    )
    total = 'total = sum(t["amount"] for t in found if t["sender"]["email"] == profile["email"])'
    return Made(
        f"How many dollars have I sent to {_named(other)} on Venmo in total?",
        [
            f"{login('venmo')}\n{PEOPLE}\n{BY_NAME}\n{rows}\nprint(found)",
            f"{total}\napis.supervisor.complete_task(answer=int(total))",
        ],
        answer=int(sent[number]),
    )


@kind("request", 2, held_out=True)
def _request(draw: Draw) -> Made:
    other, amount, text = draw.other(), float(draw.rng.randint(3, 60)), draw.words()
    me, asked = draw.user("venmo"), draw.user("venmo", other)
    row = {"sender_id": me.id, "receiver_id": asked.id, "amount": amount, "description": text}
    return Made(
        f'Request ${amount:.0f} from {_named(other)} on Venmo, with the note "{text}".',
        [
            f"{login('venmo')}\n{PEOPLE}\n{BY_NAME}\nprint(emails)",
            f"apis.venmo.create_payment_request(user_email=emails[{_named(other)!r}], "
            f"amount={amount:.0f}, description={text!r}, access_token=venmo)\n{DONE}",
        ],
        changes={
            "venmo.PaymentRequest": {"added": [{"row": row}]},
            "venmo.Notification": {"added": [{"row": {"user_id": asked.id}}]},
        },
    )


# Hard: two apps, or a result for each of several rows


@kind("settle", 3)
def _settle(draw: Draw) -> Made:
    notes = [note for note in draw.user("simple_note").notes if note.content.startswith("I owe")]
    note, text = draw.rng.choice(notes), draw.words()
    by_name = {_named(person): person for person in draw.people}
    owed = re.findall(r"- (.+): \$(\d+)", note.content)
    find = f"apis.simple_note.search_notes(access_token=simple_note, query={note.title!r})"
    pattern = r'owed = re.findall(r"- (.+): \$(\d+)", note["content"])'
    return Made(
        f'My note "{note.title}" in Simple Note says what I owe to whom. Send each of them that '
        f'amount on Venmo, with the note "{text}".',
        [
            f"{login('simple_note', 'venmo')}\nnotes = {find}\n"
            f'number = [n["note_id"] for n in notes if n["title"] == {note.title!r}][0]\n'
            "note = apis.simple_note.show_note(note_id=number, access_token=simple_note)\n"
            'print(note["content"])',
            f"{pattern}\n{PEOPLE}\n{BY_NAME}\n"
            "print([(emails[name], amount) for name, amount in owed])",
            "for name, amount in owed:\n    " + _payment("emails[name]", "float(amount)", text),
        ],
        changes=_paid(draw, [(by_name[name], float(amount), text) for name, amount in owed]),
    )


def _contact(draw: Draw) -> tuple[Any, str]:
    contact = draw.rng.choice(draw.user("phone").contacts)
    [person] = [person for person in draw.people if person.email == contact.email]
    return person, contact.relationships[0]


def _find(relation: str) -> str:
    return f'{CONTACTS}\nfound = [c for c in contacts if {relation!r} in c["relationships"]]'


@kind("relation-pay", 3)
def _relation_pay(draw: Draw) -> Made:
    (other, relation), amount = _contact(draw), float(draw.rng.randint(3, 60))
    text = draw.words()
    return Made(
        f'Send ${amount:.0f} to my {relation} on Venmo, with the note "{text}". My phone\'s '
        "contacts say who that is.",
        [
            f"{login('phone', 'venmo')}\n{_find(relation)}\nprint(found)",
            _payment('found[0]["email"]', f"{amount:.0f}", text),
        ],
        changes=_paid(draw, [(other, amount, text)]),
    )


@kind("playlist", 3)
def _playlist(draw: Draw) -> Made:
    artist, songs = _by_artist(draw)
    title = draw.words(3)
    made = {"user_id": draw.user("spotify").id, "title": title, "is_public": False}
    return Made(
        f'Make a private Spotify playlist "{title}" of all songs by {artist.name} that are in my '
        "song library.",
        [
            f"{login('spotify')}\n{LIBRARY}\n{_of_artist(artist.name)}\nprint(mine)",
            f"made = apis.spotify.create_playlist(title={title!r}, access_token=spotify)\n"
            "print(made)",
            "for song in mine:\n"
            '    apis.spotify.add_song_to_playlist(playlist_id=made["playlist_id"], '
            f'song_id=song["song_id"], access_token=spotify)\n{DONE}',
        ],
        changes={
            "spotify.Playlist": {"added": [{"row": made}]},
            "spotify.PlaylistSong": {"added": [{"row": {"song_id": song.id}} for song in songs]},
        },
    )


@kind("relation-text", 3, held_out=True)
def _relation_text(draw: Draw) -> Made:
    (other, relation), text = _contact(draw), f"{draw.words(3)}!"
    me, receiver = draw.user("phone"), draw.user("phone", other)
    row = {"sender_id": me.id, "receiver_id": receiver.id, "message": text}
    return Made(
        f'Send a text message to my {relation}: "{text}"',
        [
            f"{login('phone')}\n{_find(relation)}\nprint(found)",
            'apis.phone.send_text_message(phone_number=found[0]["phone_number"], '
            f"message={text!r}, access_token=phone)\n{DONE}",
        ],
        changes={
            "phone.GlobalTextMessage": {"added": [{"row": row}]},
            "phone.UserTextMessage": {
                "added": [{"row": {"user_id": me.id}}, {"row": {"user_id": receiver.id}}]
            },
        },
    )
