"""The scripted model: its file, and a state that is as limited as a real one."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
from server_harness import random_engine, tokenizer

from ds4.engine import EngineConfig, Sampling
from ds4.errors import Ds4Error
from ds4.server import scripted as scripted_module
from ds4.server.decode import TokenRules
from ds4.server.scripted import Line, ScriptedState, ScriptedTokenizer, load_script, read_script, scripted_backend
from ds4.server.slots import Slot


def backend(*lines: Line, **options: Any) -> Any:
    return scripted_backend(lines, tokenizer(), EngineConfig(context=256, prefill_chunk=8), **options)


def test_a_line_has_defaults_and_reads_base64() -> None:
    text = (
        '{"pieces": ["a", "base64:8J8="]}\n\n{"pieces": [], "then": "eos", "step_ms": 1.5, "obey": true, "fail_at": 3}'
    )
    assert read_script(text) == [
        Line((b"a", b"\xf0\x9f")),
        Line((), "eos", step_ms=1.5, obey=True, fail_at=3),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no lines"),
        ("{}\n{", "line 2 is not JSON"),
        ("[]", "line 1 must be a JSON object"),
        ('{"peices": []}', "'peices' is not known"),
        ('{"pieces": "abc"}', "pieces cannot be"),
        ('{"pieces": [""]}', "pieces cannot be"),
        ('{"pieces": ["base64:?"]}', "is not base64"),
        ('{"then": "stop"}', "then cannot be"),
        ('{"then": "repeat"}', "nothing to repeat"),
        ('{"step_ms": -1}', "step_ms cannot be"),
        ('{"step_ms": "1"}', "step_ms cannot be"),
        ('{"obey": 1}', "obey cannot be"),
        ('{"fail_at": 0}', "fail_at cannot be"),
        ('{"hang_at": true}', "hang_at cannot be"),
    ],
)
def test_a_wrong_script_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(Ds4Error, match=message):
        read_script(text, "file")


def test_a_script_that_cannot_be_read_is_named(tmp_path: Any) -> None:
    with pytest.raises(Ds4Error, match="missing"):
        load_script(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xff")
    with pytest.raises(Ds4Error, match="binary"):
        load_script(tmp_path / "binary")


def test_pieces_are_vocabulary_special_tokens_or_ids_above() -> None:
    base = tokenizer()
    extended = ScriptedTokenizer(
        base, [b"</think>", b"a", "｜DSML｜".encode(), b"<think", b"zzqq", b"zzqq", b"\xf0\x9f"]
    )
    assert extended.piece(b"</think>") == base.end_think
    assert extended.piece("｜DSML｜".encode()) == base.dsml
    assert extended.piece(b"a") == base.encode("a")[0]
    own = [extended.piece(piece) for piece in (b"<think", b"zzqq", b"\xf0\x9f")]
    assert len(set(own)) == 3
    assert base.vocab_size <= min(own)
    assert max(own) < extended.ids
    assert extended.decode([*own, base.think]) == b"<thinkzzqq\xf0\x9f<think>"
    assert extended.key_bytes([own[0], base.think]) == b"<think\xff<think>"
    with pytest.raises(Ds4Error):
        extended.token_bytes(base.vocab_size)


def test_lines_are_taken_in_order_and_the_last_repeats() -> None:
    made = backend(Line((b"a", b"b")), Line((b"c",), "repeat"))
    ids = []
    for _ in range(3):
        session = made.engine.session()
        session.sync([1, 2])
        chooser = made.chooser(session, Sampling())
        ids.append([chooser.choose(session, TokenRules()).token for _ in range(4)])
    a, b, c = (tokenizer().encode(x)[0] for x in "abc")
    eos = tokenizer().eos
    assert ids == [[a, b, eos, eos], [c] * 4, [c] * 4]


def test_obeying_passes_over_what_is_forbidden() -> None:
    a, b = (tokenizer().encode(x)[0] for x in "ab")
    for obey, expected, skipped in ((True, [b, tokenizer().eos], [[a], []]), (False, [a, b], [[], []])):
        made = backend(Line((b"a", b"b"), obey=obey))
        session = made.engine.session()
        session.sync([1])
        chooser = made.chooser(session, Sampling())
        rules = TokenRules(forbidden=frozenset({a}))
        for token, passed in zip(expected, skipped, strict=True):
            choice = chooser.choose(session, rules)
            assert choice.token == token
            assert chooser.skipped(choice, rules) == passed


def test_steps_take_their_time_and_a_batch_the_longest() -> None:
    waited: list[float] = []
    made = backend(
        Line((b"a",), prefill_ms_per_token=10, step_ms=30),
        Line((b"a",), step_ms=50),
        wait=lambda s: bool(waited.append(s)),
    )
    one, two = made.engine.session(), made.engine.session()
    choosers = [made.chooser(session, Sampling()) for session in (one, two)]
    one.sync(range(1, 11))
    assert waited == pytest.approx([0.08, 0.02])  # chunks of 8
    two.sync([1])
    for chooser, session in zip(choosers, (one, two), strict=True):
        chooser.choose(session, TokenRules())
    waited.clear()
    made.engine.step([(one, [5]), (two, [5])])
    assert waited == pytest.approx([0.05])


def test_failures_and_hanging_come_at_their_place() -> None:
    made = backend(Line((b"a",), fail_prefill_at=9), Line((b"a",), fail_at=2), Line((b"a",), hang_at=1))
    first = made.engine.session()
    made.chooser(first, Sampling())
    with pytest.raises(RuntimeError, match="token 9 of the prompt"):
        first.sync(range(1, 12))
    assert len(first.tokens) == 8
    second = made.engine.session()
    chooser = made.chooser(second, Sampling())
    second.sync([1])
    chooser.choose(second, TokenRules())
    second.step(3)
    with pytest.raises(RuntimeError, match="step 2"):
        second.step(3)
    third = made.engine.session()
    chooser = made.chooser(third, Sampling())
    third.sync([1])
    chooser.choose(third, TokenRules())
    caught: list[BaseException] = []

    def hang() -> None:
        try:
            third.step(3)
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=hang)
    thread.start()
    assert not caught
    made.close()
    thread.join(10)
    assert "hung" in str(caught[0])


def test_a_scripted_session_goes_back_like_a_real_one() -> None:
    made = backend(Line((b"a",)))
    session = made.engine.session()
    session.sync(range(1, 101), boundaries=[40])
    assert session.state.nbytes == 100 * 64
    session.sync([*range(1, 91), 7])  # ten tokens back are free
    assert session.reused == 90
    session.sync([*range(1, 61), 7])
    assert session.reused == 40  # further back only at checkpoints
    assert session.tokens == session.state.tokens == [*range(1, 61), 7]
    fork = session.fork()
    fork.step(9)
    assert session.state.length == 61
    exported = session.export(30)
    other = made.engine.session()
    other.sync(range(1, 31))
    other.import_state(session.tokens, exported)
    assert other.state.tokens == session.tokens


def test_a_state_refuses_what_it_cannot_do() -> None:
    state = ScriptedState(1)
    state.extend(range(40))
    checkpoint = state.checkpoint()
    assert not state.can_truncate(20)
    with pytest.raises(ValueError, match="without a checkpoint"):
        state.truncate(20)
    assert [state.can_truncate(n) for n in (40, 24, 23, 22)] == [True, True, True, False]
    assert state.checkpoint(length=23).length == 23
    with pytest.raises(ValueError, match="none of 22 tokens"):
        state.checkpoint(length=22)
    state.truncate(30)
    assert not state.can_truncate(20)
    with pytest.raises(ValueError, match="behind the end"):
        state.restore(checkpoint)
    state.spoil()
    assert not state.can_truncate(30)
    with pytest.raises(ValueError, match="only 30 are here"):
        state.import_state(ScriptedState(1).export(0).__class__(35, checkpoint, (), b""))


@pytest.mark.parametrize("end", [40, 64])
def test_a_scripted_state_reaches_back_as_far_as_a_real_one(end: int) -> None:
    real = random_engine().session()
    real.sync(range(1, end + 1), boundaries=[])
    state = ScriptedState(1)
    state.extend(range(1, end + 1))
    for length in range(end + 2):
        assert state.can_truncate(length) == real.state.can_truncate(length)


def test_a_slot_knows_how_far_its_session_goes_back() -> None:
    made = backend(Line((b"a",)))
    session = made.engine.session()
    session.sync(range(1, 101), boundaries=[])
    session.checkpoints.clear()
    slot = Slot(session)
    for length in range(75, 100):
        branch = session.fork()
        branch.sync([*range(1, length + 1), 7], boundaries=[])
        assert slot.reachable(length) == branch.reused
    assert (slot.reachable(83), slot.reachable(82)) == (83, 0)


def test_a_state_takes_its_own_tokens_to_another_script() -> None:
    first = backend(Line((b"zzqq", b"\xf0\x9f", b"a")))
    ids = [first.engine.tokenizer.piece(piece) for piece in (b"zzqq", b"\xf0\x9f", b"a")]
    session = first.engine.session()
    session.sync([*range(1, 31), *ids])
    exported = session.export()
    assert exported.extra == {ids[0]: b"zzqq", ids[1]: b"\xf0\x9f"}
    assert first.engine.session().state.export().extra == {}

    other = backend(Line((b"unheard-of", b"zzqq")))
    tokens = other.engine.tokenizer
    assert tokens.piece(b"zzqq") == ids[0]
    assert tokens.piece(b"unheard-of") not in ids
    with pytest.raises(Ds4Error):
        tokens.token_bytes(ids[1])
    continued = other.engine.session()
    continued.import_state(session.tokens, exported)
    assert tokens.decode(continued.tokens[30:]) == tokens.decode(continued.state.fork().tokens[30:])
    assert tokens.decode(continued.tokens[30:]) == b"zzqq\xf0\x9fa"
    assert continued.export(31).extra == {ids[1]: b"\xf0\x9f"}

    strange = dataclasses.replace(exported, extra={ids[0]: b"other bytes"})
    with pytest.raises(ValueError, match="stands for b'zzqq' here, but for b'other bytes'"):
        other.engine.session().import_state(session.tokens, strange)


def test_pieces_that_meet_at_one_id_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted_module, "_PIECE_IDS", 6)
    pieces = [b"zzqq", b"qqzz", b"zqzq"]
    extended = ScriptedTokenizer(tokenizer(), pieces)
    ids = [extended.piece(piece) for piece in pieces]
    assert len(set(ids)) == 3
    assert all(tokenizer().vocab_size <= id < extended.ids == tokenizer().vocab_size + 6 for id in ids)
    assert extended.decode(ids) == b"".join(pieces)
    extended.add([*pieces, b"a"])
    with pytest.raises(Ds4Error, match="more than 3 different pieces"):
        extended.add([b"qzqz"])


def test_a_second_attempt_takes_the_next_line() -> None:
    made = backend(Line((b"a",)), Line((b"b",), fail_prefill_at=3), Line((b"c",)))
    session = made.engine.session()
    session.sync([1])
    chooser = made.chooser(session, Sampling())
    assert tokenizer().token_bytes(chooser.choose(session, TokenRules()).token) == b"a"
    again = chooser.again(session)
    with pytest.raises(RuntimeError, match="token 3 of the prompt"):
        session.sync(range(1, 5))
    assert tokenizer().token_bytes(again.choose(session, TokenRules()).token) == b"b"
