"""Prompts to token ids: a tiny tokenizer on disk, the ids counted out by hand."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Bpe
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from evenhand.client import InvalidConfig, InvalidRequest
from evenhand.client.tokenizer import Tokenizer

SPECIAL = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('Nobody speaks here.') }}{% endif %}"
    "{{ '<|' + m.role + '|>' + m.content }}{% for c in m.tool_calls or [] %}"
    "{% for name, value in c.function.arguments.items() %}{{ name }}={{ value }};{% endfor %}{% endfor %}"
    "{% if not loop.last or add_generation_prompt %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% if not thinking | default(true) %}{{ '</s>' }}"
    "{% endif %}{% endif %}"
)
TEXT = "The quick brown fox jumps over the lazy dog, quickly and browner than the other foxes."
HELLO = [{"role": "system", "content": "the dog"}, {"role": "user", "content": "quick fox"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE that adds ``<s>`` by itself, saved as a model's folder has it."""
    path = tmp_path_factory.mktemp("model")
    bpe = Bpe(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([TEXT], trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    bpe.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def ids(folder: Path) -> Any:
    """Token ids of special tokens and texts, one after another, by the tokenizers library alone."""
    bpe = Bpe.from_file(str(folder / "tokenizer.json"))

    def join(*parts: str) -> list[int]:
        found: list[int] = []
        for part in parts:
            found += [SPECIAL.index(part)] if part in SPECIAL else bpe.encode(part, add_special_tokens=False).ids
        return found

    return join


def test_a_completion_has_the_special_tokens_the_tokenizer_adds(tokenizer: Tokenizer, ids: Any) -> None:
    assert tokenizer.completion(TEXT) == ids("<s>", TEXT)
    assert len(tokenizer.completion(TEXT)) < len(TEXT)


def test_a_chat_has_those_of_its_template_and_no_other(tokenizer: Tokenizer, ids: Any) -> None:
    parts = ["<s>", "<|system|>", "the dog", "<|end|>", "<|user|>", "quick fox"]
    assert tokenizer.chat(HELLO) == ids(*parts, "<|end|>", "<|assistant|>")
    assert tokenizer.chat(HELLO, add_generation_prompt=False) == ids(*parts)
    assert tokenizer.chat(HELLO, thinking=False) == ids(*parts, "<|end|>", "<|assistant|>", "</s>")
    assert tokenizer.chat(HELLO, chat_template="{{ messages[1].content }}") == ids("quick fox")


def test_the_last_message_can_be_continued(tokenizer: Tokenizer, ids: Any) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "The lazy"}]
    found = tokenizer.chat(begun, add_generation_prompt=False, continue_final_message=True)
    assert found[-len(ids("The lazy")) :] == ids("The lazy")
    with pytest.raises(InvalidRequest, match="makes no prompt"):
        tokenizer.chat(begun, continue_final_message=True)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [('{"fox": "quick"}', ["fox=quick;"]), ({"fox": "quick"}, ["fox=quick;"]), ("", []), ("not JSON", [])],
)
def test_arguments_of_tool_calls_reach_the_template_as_objects(
    tokenizer: Tokenizer, ids: Any, arguments: object, shown: Sequence[str]
) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    found = tokenizer.chat([message], add_generation_prompt=False)
    assert found == ids("<s>", "<|assistant|>", *shown)
    assert call["function"]["arguments"] == arguments, "the caller's own message stays as it is"  # type: ignore[index]


def test_tools_are_printed_in_the_engines_order(tokenizer: Tokenizer, ids: Any) -> None:
    tool = {"function": {"parameters": {"b": 1, "a": 2}, "name": "look", "colour": "red"}, "type": "function"}
    printed = (
        '[{"type": "function", "function": {"name": "look", "description": null, "parameters": {"b": 1, "a": 2}}}]'
    )
    found = tokenizer.chat([{"role": "user", "content": "dog"}], tools=[tool], add_generation_prompt=False)
    assert found == ids("<s>", printed, "<|user|>", "dog")
    with pytest.raises(InvalidRequest, match="no function with a name"):
        tokenizer.chat(HELLO, tools=[{"type": "function"}])


def test_a_template_that_refuses_is_named(tokenizer: Tokenizer, folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="Nobody speaks here") as caught:
        tokenizer.chat([{"role": "nobody", "content": ""}])
    assert str(folder) in str(caught.value)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="No tokenizer can be loaded from") as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("package", ["transformers", "jinja2"])
def test_a_missing_package_is_one_sentence(package: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InvalidConfig) as caught:
        Tokenizer.load(folder)
    assert str(caught.value) == (
        "Turning prompts into token ids needs transformers: pip install 'evenhand[tokenize]'."
    )


def test_the_sdk_does_not_import_it_unasked() -> None:
    code = "import sys, evenhand.client; evenhand.client.Tokenizer; print(*sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True)
    assert not {name.split(".")[0] for name in run.stdout.split()} & {"transformers", "tokenizers", "jinja2"}
