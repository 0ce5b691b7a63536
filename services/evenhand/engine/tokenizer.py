"""A tiny deterministic tokenizer: enough to turn text into token ids and back without a model.

::

    0 … 4        pad, begin, end, start of message, end of message
    5 … 260      the bytes of UTF-8
    300 … 31999  words the engine generates: a space and three syllables, " kamilo"

Any text becomes its bytes, except that a generated word becomes its own single token again. So decoding and
encoding are inverse, and a conversation sent back as text has exactly the tokens it was generated with: its
output blocks are hit, as with a real tokenizer.
"""

import re
from collections.abc import Iterable, Sequence

from evenhand.engine.content import FIRST_OUTPUT_TOKEN, VOCABULARY_SIZE

BEGIN, END, MESSAGE_START, MESSAGE_END = 1, 2, 3, 4
_FIRST_BYTE = 5
_SYLLABLES = tuple(
    consonant + vowel for consonant in ("b", "d", "f", "k", "l", "m", "n", "s") for vowel in ("a", "e", "i", "o")
)
_INDEX = {syllable: index for index, syllable in enumerate(_SYLLABLES)}
_BASE = len(_SYLLABLES)
_GENERATED = re.compile(r" ((?:[bdfklmns][aeio]){3})(?![A-Za-z])")

assert _BASE**3 >= VOCABULARY_SIZE - FIRST_OUTPUT_TOKEN, "three syllables name every generated token"


def encode(text: str) -> list[int]:
    """The tokens of ``text``, without specials."""
    tokens: list[int] = []
    position = 0
    for match in _GENERATED.finditer(text):
        token = _token_of(match[1])
        if token >= VOCABULARY_SIZE:
            continue
        tokens += [_FIRST_BYTE + byte for byte in text[position : match.start()].encode()]
        tokens.append(token)
        position = match.end()
    tokens += [_FIRST_BYTE + byte for byte in text[position:].encode()]
    return tokens


def encode_prompt(text: str) -> list[int]:
    """A completion's prompt: the begin token, then the text."""
    return [BEGIN, *encode(text)]


def encode_chat(messages: Sequence[tuple[str, str]]) -> list[int]:
    """(role, content) pairs under the chat template, ready for the assistant's answer."""
    tokens = [BEGIN]
    for role, content in messages:
        tokens += [MESSAGE_START, *encode(f"{role}\n"), *encode(content), MESSAGE_END]
    return [*tokens, MESSAGE_START, *encode("assistant\n")]


def decode(tokens: Iterable[int]) -> str:
    """The text of ``tokens``. Specials are silent; bytes that are no UTF-8 become U+FFFD."""
    pieces = bytearray()
    for token in tokens:
        if FIRST_OUTPUT_TOKEN <= token < VOCABULARY_SIZE:
            pieces += _word_of(token).encode()
        elif _FIRST_BYTE <= token < _FIRST_BYTE + 256:
            pieces.append(token - _FIRST_BYTE)
    return pieces.decode(errors="replace")


def _word_of(token: int) -> str:
    rest = token - FIRST_OUTPUT_TOKEN
    return " " + _SYLLABLES[rest // _BASE**2] + _SYLLABLES[rest // _BASE % _BASE] + _SYLLABLES[rest % _BASE]


def _token_of(word: str) -> int:
    first, second, third = (_INDEX[word[at : at + 2]] for at in (0, 2, 4))
    return FIRST_OUTPUT_TOKEN + (first * _BASE + second) * _BASE + third
