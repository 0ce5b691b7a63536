"""Options: every field is one, and what cannot be is said in one sentence."""

from dataclasses import fields

import pytest

from evenhand.core.errors import InvalidConfig
from evenhand.engine.config import EngineConfig, option_texts, parse_arguments


def test_every_field_is_an_option_of_its_name() -> None:
    argv: list[str] = []
    expected: dict[str, object] = {}
    values: dict[str, object] = {
        "lora": ("a", "b"),
        "allow_remote": True,
        "host": "0.0.0.0",
        "event_form": "array",
        "hash_form": "bytes",
        "order": "longest-prefix",
    }
    for field in fields(EngineConfig):
        value = values.get(field.name)
        if value is None:
            assert isinstance(field.default, str | int | float)
            value = f"{field.default}x" if isinstance(field.default, str) else field.default + 1
        expected[field.name] = value
        option = "--" + field.name.replace("_", "-")
        if isinstance(value, tuple):
            argv += [part for item in value for part in (option, item)]
        elif value is True:
            argv.append(option)
        else:
            argv += [option, str(value)]
    expected["block_size"] = 16
    argv[argv.index("--block-size") + 1] = "16"
    assert parse_arguments(argv) == EngineConfig(**expected)  # type: ignore[arg-type]


def test_defaults_are_valid_and_name_the_topic() -> None:
    config = parse_arguments([])
    assert config == EngineConfig()
    assert config.publisher.topic == "kv@engine@sim"


def test_a_topic_can_be_named_and_be_empty_as_a_stock_engines() -> None:
    assert parse_arguments(["--topic", "kv"]).publisher.topic == "kv"
    assert parse_arguments(["--topic", "-"]).publisher.topic == ""


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--colour", "red"], "Unrecognized arguments: --colour red"),
        (["--port", "x"], "Argument --port: invalid int value: 'x'"),
        (["--port", "70000"], "port is 70000"),
        (["--port", "5557"], "must differ from one another"),
        (["--block-size", "0"], "block_size is 0"),
        (["--kv-blocks", "10"], "blocks is 10"),
        (["--max-num-seqs", "5000"], "must be at least sequences_max"),
        (["--step-base-ms", "0"], "step_base_ms is 0.0"),
        (["--prefill-token-us", "-1"], "prefill_token_us is -1.0"),
        (["--prefill-token-us", "nan"], "prefill_token_us is nan"),
        (["--order", "lifo"], "order is 'lifo', but must be one of fcfs, longest-prefix"),
        (["--event-form", "xml"], "event_form is 'xml'"),
        (["--hash-form", "md5"], "hash_form is 'md5'"),
        (["--max-queued", "0"], "max_queued must be at least 1"),
        (["--host", "0.0.0.0"], "host 0.0.0.0 is not loopback"),
    ],
)
def test_what_cannot_be_is_one_sentence(argv: list[str], words: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse_arguments(argv)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_milliseconds_and_microseconds_become_nanoseconds() -> None:
    step_time = EngineConfig(step_base_ms=2.5, prefill_token_us=40, running_sequence_us=0.5).step_time
    assert (step_time.base_ns, step_time.prefill_token_ns, step_time.running_sequence_ns) == (
        2_500_000,
        40_000,
        500,
    )


def test_every_option_is_explained_in_the_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    assert set(option_texts()) == {field.name for field in fields(EngineConfig)}
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--help"])
    assert caught.value.code == 0
    page = " ".join(capsys.readouterr().out.split())
    for name, text in option_texts().items():
        assert f"--{name.replace('_', '-')} " in page
        assert " ".join(text.replace("``", "").split()) in page
