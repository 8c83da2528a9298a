"""The command ds4-kv: what it says of a directory, what it deletes, and entries that move to another one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds4.cli.kv import main
from ds4.kvstore.container import StoredCall, ToolTurn
from ds4.kvstore.reading import Entry, OpenEntry, verify, verify_open
from ds4.kvstore.store import Store
from tests.engine.session_helpers import tokens
from tests.helpers import random_engine
from tests.kvstore.helpers import open_store, restore, save

ENGINE = random_engine()


@pytest.fixture
def chain(tmp_path: Path) -> list[Entry]:
    """Three entries, each of which builds on the one before."""
    store, session, parent, entries = open_store(tmp_path / "kv", ENGINE), ENGINE.session(), None, []
    for n in (20, 45, 70):
        session.sync(tokens(n))
        turns = [ToolTurn("block", (StoredCall("call_1", "f", "{}"),))] if n == 70 else []
        parent = save(store, session, parent, key=b"\xff<User>words" + bytes(n), turns=turns)
        assert parent is not None
        entries.append(parent)
    store.close()
    return entries


def say(capsys: pytest.CaptureFixture[str], status: int, *arguments: object) -> str:
    """What the command prints."""
    assert main([str(argument) for argument in arguments]) == status
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_list_and_show(tmp_path: Path, chain: list[Entry], capsys: pytest.CaptureFixture[str]) -> None:
    listed = say(capsys, 0, "list", tmp_path / "kv")
    for entry in chain:
        assert entry.name[:12] in listed
    assert "<User>words" in listed
    assert "3 entries" in listed
    assert "\0" not in listed
    assert "words" not in say(capsys, 0, "list", tmp_path / "kv", "--no-text")
    shown = say(capsys, 0, "show", tmp_path / "kv", chain[-1].name[:8])
    assert f"{chain[1].name[:40]} (45 tokens)" in shown
    assert "tool calls:  1" in shown
    assert "other, experts of 32 bits" in shown
    assert say(capsys, 0, "show", tmp_path / "kv", chain[0].name, "--text") == "<User>words" + "\0" * 20
    assert "no entry has a key" in say(capsys, 1, "show", tmp_path / "kv", "zzz")


def test_verify_finds_damage_and_what_depends_on_it(
    tmp_path: Path, chain: list[Entry], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "3 entries checked, 0 wrong" in say(capsys, 0, "verify", tmp_path / "kv")
    path = tmp_path / "kv" / chain[1].name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    said = say(capsys, 1, "verify", tmp_path / "kv")
    assert f"{chain[1].name[:40]}: the checksum of section" in said
    assert "2 wrong and deleted" in say(capsys, 0, "verify", tmp_path / "kv", "--delete")
    assert [file.name for file in (tmp_path / "kv").glob("*.kv")] == [chain[0].name]


def test_a_damaged_file_is_verified_by_its_name(
    tmp_path: Path, chain: list[Entry], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kv" / ("d" * 40 + ".kv")).write_bytes(b"something else")
    assert "the file has 14 bytes" in say(capsys, 1, "verify", tmp_path / "kv", "ddd")
    assert "ddd" not in say(capsys, 0, "verify", tmp_path / "kv", chain[0].name)
    assert not caplog.records  # each problem is told once
    assert "verify says why" in say(capsys, 1, "show", tmp_path / "kv", "ddd")
    assert "1 entries checked, 1 wrong and deleted" in say(capsys, 0, "verify", tmp_path / "kv", "ddd", "--delete")
    assert "3 entries checked, 0 wrong" in say(capsys, 0, "verify", tmp_path / "kv")


def test_what_servers_delete_meanwhile_is_no_error(
    tmp_path: Path, chain: list[Entry], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usable = Store.usable

    def delete(self: Store, entry: Entry) -> bool:
        (tmp_path / "kv" / chain[-1].name).unlink(missing_ok=True)
        return usable(self, entry)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "usable", delete)
        listed = say(capsys, 0, "list", tmp_path / "kv")
    assert "[No such file or directory]" in listed
    assert listed.count("<User>words") == 2
    monkeypatch.setattr("ds4.cli.kv_entries.verify", lambda files, name: verify(files, "0" * 40 + ".kv"))
    assert "2 entries checked, 0 wrong" in say(capsys, 0, "verify", tmp_path / "kv")


def test_notes_and_times_that_make_no_sense_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, session = open_store(tmp_path / "kv", ENGINE, now=lambda: 2.0**63), ENGINE.session()
    for n, noted in enumerate([[["front", float("inf"), "x"], ["bare", 7, "y"], 3], 5, {"a": 1}]):
        session.sync(tokens(5 + n))
        entry = save(store, session, meta={"ways": noted})
        assert entry is not None
        assert entry.ways == ((("bare", 7, "y"),) if n == 0 else ())
    assert "seconds after 1970" in say(capsys, 0, "show", tmp_path / "kv", entry.name)
    assert "3 entries" in say(capsys, 0, "list", tmp_path / "kv")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_texts_are_printed_as_far_as_the_output_can(tmp_path: Path, encoding: str) -> None:
    store, session = open_store(tmp_path / "kv", ENGINE), ENGINE.session()
    session.sync(tokens(5))
    assert save(store, session, key="<｜User｜>words".encode())
    command = [sys.executable, "-m", "ds4.cli.kv", "list", str(tmp_path / "kv")]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding}, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"<?User?>words" in done.stdout


def test_prune(tmp_path: Path, chain: list[Entry], capsys: pytest.CaptureFixture[str]) -> None:
    kept = sum(file.stat().st_size for file in (tmp_path / "kv").iterdir()) - chain[-1].size
    assert "1 entries deleted" in say(capsys, 0, "prune", tmp_path / "kv", "--size", kept)
    assert not (tmp_path / "kv" / chain[-1].name).exists()
    assert "is no size" in say(capsys, 2, "prune", tmp_path / "kv", "--size", "much")
    assert "2 entries deleted" in say(capsys, 0, "prune", tmp_path / "kv", "--size", "0")
    assert list((tmp_path / "kv").glob("*.kv")) == []


def test_an_entry_moves_to_another_directory(
    tmp_path: Path, chain: list[Entry], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "one.kv"
    say(capsys, 0, "export", tmp_path / "kv", chain[-1].name, file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert "cannot be written: File exists" in say(capsys, 1, "export", tmp_path / "kv", chain[-1].name, file)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv", "one.kv"]
    say(capsys, 0, "import", tmp_path / "other", file)
    assert "here already" in say(capsys, 1, "import", tmp_path / "other", file)
    assert "1 entries checked, 0 wrong" in say(capsys, 0, "verify", tmp_path / "other")
    store = open_store(tmp_path / "other", ENGINE)
    (entry,) = store.entries()
    assert (entry.name, entry.start, entry.tokens) == (chain[-1].name, 0, 70)
    session = ENGINE.session()
    session.sync(tokens(70))
    assert torch.equal(restore(store, ENGINE, entry).logits, session.logits)
    assert store.turns(entry)[0].calls[0].id == "call_1"


def test_a_damaged_file_is_not_imported(tmp_path: Path, chain: list[Entry], capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "one.kv"
    say(capsys, 0, "export", tmp_path / "kv", chain[-1].name, file)
    data = file.read_bytes()
    for bad in (data[:-1], data + b"x", data[:700] + bytes([data[700] ^ 1]) + data[701:], b"", b"KVC"):
        file.write_bytes(bad)
        assert "cannot be imported" in say(capsys, 1, "import", tmp_path / "new", file)
        assert not (tmp_path / "new").exists()
        (tmp_path / "other").mkdir(exist_ok=True)
        assert "cannot be imported" in say(capsys, 1, "import", tmp_path / "other", file)
        assert list((tmp_path / "other").glob("*.kv*")) == []
    segment = (tmp_path / "kv" / chain[1].name).read_bytes()
    file.write_bytes(segment)
    assert "builds on other entries" in say(capsys, 1, "import", tmp_path / "other", file)


def test_a_damaged_entry_is_not_exported(
    tmp_path: Path, chain: list[Entry], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kv" / chain[-1].name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert "cannot be exported" in say(capsys, 1, "export", tmp_path / "kv", chain[-1].name, tmp_path / "one.kv")
    assert [path.name for path in tmp_path.iterdir()] == ["kv"]


def test_an_entry_that_a_server_stores_meanwhile_stays(
    tmp_path: Path, chain: list[Entry], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, there = tmp_path / "one.kv", tmp_path / "other" / chain[-1].name
    say(capsys, 0, "export", tmp_path / "kv", chain[-1].name, file)

    there.parent.mkdir()

    def check(found: OpenEntry) -> Entry:
        there.write_bytes(file.read_bytes())
        return verify_open(found)

    monkeypatch.setattr("ds4.kvstore.transfer.verify_open", check)
    assert "here already" in say(capsys, 1, "import", tmp_path / "other", file)
    assert sorted(path.name for path in there.parent.glob("*.kv*")) == [there.name]


def test_what_is_no_file_is_not_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        assert "it is no file" in say(capsys, 1, "import", tmp_path / "other", tmp_path / name)
    assert "cannot be read" in say(capsys, 1, "import", tmp_path / "other", tmp_path / "nowhere")
    (tmp_path / "text").write_text("no conversation")
    assert "cannot be imported" in say(capsys, 1, "import", tmp_path / "other", tmp_path / "text")
    assert not (tmp_path / "other").exists()


def test_a_text_does_not_steer_a_terminal(
    tmp_path: Path, chain: list[Entry], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, session = open_store(tmp_path / "kv", ENGINE), ENGINE.session()
    session.sync(tokens(5))
    entry = save(store, session, key=b"a\n\x1b]0;title\x07b")
    assert entry is not None
    assert "\x1b" not in say(capsys, 0, "list", tmp_path / "kv")
    assert say(capsys, 0, "show", tmp_path / "kv", entry.name, "--text") == "a\n\x1b]0;title\x07b"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert say(capsys, 0, "show", tmp_path / "kv", entry.name, "--text") == "a\n ]0;title b"


@pytest.mark.parametrize("command", ["list", "verify", "show x", "prune --size 1", "export x y"])
def test_an_empty_directory_stays_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    tmp_path.chmod(0o755)
    name, *rest = command.split()
    assert "no conversations are stored there" in say(capsys, 1, name, tmp_path, *rest)
    assert list(tmp_path.iterdir()) == []
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_a_directory_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be used" in say(capsys, 1, "list", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_flags_are_looked_at_without_torch() -> None:
    code = "import sys; from ds4.cli.kv import main; assert main(['prune', 'x', '--size', 'much']) == 2"
    done = subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], timeout=60, check=False)
    assert done.returncode == 0
