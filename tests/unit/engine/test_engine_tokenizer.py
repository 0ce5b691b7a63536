"""Text to tokens and back."""

from hypothesis import given
from hypothesis import strategies as st

from evenhand.engine import tokenizer
from evenhand.engine.content import FIRST_OUTPUT_TOKEN, VOCABULARY_SIZE

generated = st.integers(FIRST_OUTPUT_TOKEN, VOCABULARY_SIZE - 1)


@given(st.text())
def test_any_text_survives_the_round_trip(text: str) -> None:
    text = text.encode(errors="ignore").decode()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(generated))
def test_generated_tokens_survive_the_round_trip_through_text(tokens: list[int]) -> None:
    assert tokenizer.encode(tokenizer.decode(tokens)) == tokens


@given(
    st.text("bade kamilo fxyz", max_size=30),
    st.lists(generated, min_size=1),
    st.text("bade kamilo\n.", max_size=9),
)
def test_mixed_text_survives_the_round_trip(before: str, tokens: list[int], after: str) -> None:
    text = before + tokenizer.decode(tokens) + after
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_chat_is_a_prefix_of_its_continuation() -> None:
    first = tokenizer.encode_chat([("user", "hi")])
    answer = [400, 12_345, 31_999]
    second = tokenizer.encode_chat([("user", "hi"), ("assistant", tokenizer.decode(answer)), ("user", "more")])
    assert second[: len(first) + 3] == first + answer
    assert tokenizer.encode_chat([("user", "hi")]) != tokenizer.encode_chat([("system", "hi")])


def test_specials_are_silent() -> None:
    assert tokenizer.decode([tokenizer.BEGIN, tokenizer.MESSAGE_START, 5 + 65, tokenizer.MESSAGE_END]) == "A"
