import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.chat.tags import MAX_TAG, Grow, Tag, held_tag, read_tag, without_cut_tag
from tests.chat.helpers import DIALECTS, MARK, noise, tag_soup


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("quotes", ['""', "“”", "„“", "''", "‘’"])
def test_every_spelling_of_a_tag(dialect: str, quotes: str) -> None:
    mark = DIALECTS[dialect]
    a, b = quotes
    text = f"<{mark}parameter name={a}x y{b} string={a}false{b}>[1]</{mark}parameter>"
    tag = read_tag(text, 0)
    assert isinstance(tag, Tag)
    assert (tag.word, tag.closing, tag.name, tag.string) == ("parameter", False, "x y", False)
    assert (tag.plain, tag.exact) == (mark == "", mark == MARK)
    assert text[tag.end :].startswith("[1]")
    closing = read_tag(text, tag.end + 3)
    assert isinstance(closing, Tag)
    assert (closing.word, closing.closing, closing.end) == ("parameter", True, len(text))


@pytest.mark.parametrize(
    ("attributes", "name", "string"),
    [
        (' name="a" string="true"', "a", True),
        (' string="false" name="a"', "a", False),
        (' name="a"', "a", None),
        (' string="true"', None, True),
        ('  name = "a"  string = "TRUE" ', "a", True),
        ('\nname="a"\nstring="false"', "a", False),
        (' name="a" type="x" string="perhaps"', "a", None),
        (' name=""', "", None),
        (' name="a>b" string="true"', "a>b", True),
        (' name="a"b" string="false"', 'a"b', False),
        (' name="<a & \'b\'>" string="true"', "<a & 'b'>", True),
        (' name="say “hi”" string="true"', "say “hi”", True),
        (' name="&lt;&amp;amp;"', "&lt;&amp;amp;", None),
        (' name="a"&lt;b" string="true"', 'a"&lt;b', True),
    ],
)
def test_attributes(attributes: str, name: str | None, string: bool | None) -> None:
    text = f"<{MARK}parameter{attributes}>body"
    tag = read_tag(text, 0)
    assert isinstance(tag, Tag)
    assert (tag.name, tag.string, text[tag.end :]) == (name, string, "body")


def test_entities_are_decoded_once_if_wanted() -> None:
    tag = read_tag(f'<{MARK}invoke name="&amp;lt;&quot;&apos;&gt;&x; &">', 0, decode=True)
    assert isinstance(tag, Tag)
    assert tag.name == "&lt;\"'>&x; &"


def test_missing_quotes_end_with_the_line() -> None:
    text = f'<{MARK}parameter name="n" string=false>5\n</{MARK}parameter>'
    tag = read_tag(text, 0)
    assert isinstance(tag, Tag)
    assert (tag.name, tag.string, text[tag.end :][:1]) == ("n", None, "5")


@pytest.mark.parametrize(
    "text", ["<", f"<{MARK}inv", f"<{MARK}invoke", f"</{MARK}", "<|", f'<{MARK}invoke name="a', "</invoke ", "<D"]
)
def test_what_may_become_a_tag(text: str) -> None:
    assert read_tag(text, 0) is Grow.MORE


@pytest.mark.parametrize(
    "text", ["a", "<b", "<｜tool_calls>", f"<{MARK}invoker", "<invoke_x>", "</parameter x>", "<｜｜｜DSML", "< invoke"]
)
def test_what_is_no_tag(text: str) -> None:
    assert read_tag(text, 0) is None


def test_a_tag_has_a_greatest_length() -> None:
    text = f'<{MARK}invoke name="' + "a" * MAX_TAG
    assert read_tag(text[: MAX_TAG - 1], 0) is Grow.MORE
    assert read_tag(text, 0) is None


class CountingText(str):
    """Counts how often it is searched."""

    searches = 0

    def find(self, *args: object) -> int:
        self.searches += 1
        return super().find(*args)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [">" * 900, '">' * 450, '" >' * 300])
def test_a_name_full_of_ends_is_read_in_one_pass(name: str) -> None:
    """A growing tag is read again with every token, so one reading must not try every `>` in it."""
    text = CountingText(f'<{MARK}parameter name="{name}')
    read_tag(text, 0)
    assert text.searches <= 4


@given(st.lists(st.sampled_from(tag_soup) | noise, max_size=4).map("".join), st.booleans())
def test_a_growing_text_never_changes_its_mind(text: str, decode: bool) -> None:
    decided: Tag | Grow | None = Grow.MORE
    for end in range(1, len(text) + 1):
        tag = read_tag(text[:end], 0, decode)
        if decided is not Grow.MORE:
            assert tag == decided
        decided = tag
        if isinstance(tag, Tag):
            assert text[tag.end - 1] == ">"


@given(st.lists(st.sampled_from(tag_soup) | noise, max_size=4).map("".join))
def test_what_is_passed_on_never_holds_a_piece_of_a_marked_tag(text: str) -> None:
    for end in range(len(text) + 1):
        held = held_tag(text[:end], invokes=False)
        assert without_cut_tag(text[:end]) in (text[:held], text[:end])
    for word in ("tool_calls", "invoke", "parameter"):
        tag = f"</{MARK}{word}>" if word == "tool_calls" else f'<{MARK}{word} name="a">'
        for cut in range(1, len(tag)):
            assert held_tag(text + tag[:cut], invokes=False) == len(text)
    for cut in range(1, len("<tool_calls>")):
        assert held_tag(text + "<tool_calls>"[:cut], invokes=False) == len(text)
    for cut in range(1, len('<invoke name="a">')):
        assert held_tag(text + '<invoke name="a">'[:cut], invokes=True) == len(text)
