"""Models named on the command line: presets, JSON files, and what people get wrong in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.types import ModelShape
from moe_ckpt.commands.model_file import load_model
from moe_ckpt.simulator.models import PRESETS

SMALL = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "vocab_size": 16,
    "ffn_hidden_size": 16,
    "num_experts": 4,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "small.json"


def complaint(file: Path, content: object) -> str:
    """The error that a file with this content gets; a bytes or str is written as it is."""
    if not isinstance(content, str | bytes):
        content = json.dumps(content)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UsageError) as raised:
        load_model(str(file))
    sentence = str(raised.value)
    assert sentence.startswith(f"model {file}")
    assert sentence.isprintable()
    return sentence.removeprefix(f"model {file}").removeprefix(": ")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_found_by_its_name_in_any_case(name: str) -> None:
    assert load_model(name) is load_model(name.upper()) is load_model(name.lower()) is PRESETS[name]


def test_a_preset_wins_over_a_file_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("GPT-MoE").write_text(json.dumps(SMALL))
    assert load_model("GPT-MoE") is PRESETS["GPT-MoE"]
    assert load_model("./GPT-MoE").num_layers == 2


def test_a_file_without_a_suffix_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").write_text(json.dumps(SMALL))
    assert load_model("mine").name == "mine"


@pytest.mark.parametrize("name", PRESETS)
def test_a_file_can_say_all_that_a_preset_says(name: str, file: Path) -> None:
    shape = PRESETS[name]
    file.write_text(json.dumps({field: getattr(shape, field) for field in shape.__dataclass_fields__}))
    assert load_model(str(file)) == shape


def test_what_a_file_leaves_out_has_the_defaults_of_a_model(file: Path) -> None:
    file.write_text(json.dumps(SMALL))
    assert load_model(str(file)) == ModelShape(name="small", **SMALL)


def test_a_name_in_the_file_is_the_name_of_the_model(file: Path) -> None:
    file.write_text(json.dumps(SMALL | {"name": "mine"}))
    assert load_model(str(file)).name == "mine"


def test_a_byte_order_mark_is_no_error(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(SMALL).encode())
    assert load_model(str(file)).num_layers == 2


def test_an_unknown_name_is_told_the_closest_preset_and_that_a_file_is_possible() -> None:
    with pytest.raises(
        UsageError, match=r"'mixtral' is not known \(did you mean Mixtral-8x7B\?\).*path of a JSON file"
    ):
        load_model("mixtral")


def test_an_unknown_name_is_told_all_presets() -> None:
    with pytest.raises(UsageError, match="'zzz' is not known") as raised:
        load_model("zzz")
    assert all(name in str(raised.value) for name in PRESETS)


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800", "x" * 5000, "x/" * 5000, "folder/\udc80/\n", "."])
def test_a_name_that_no_file_can_have_is_a_usage_error_on_one_line(name: str) -> None:
    with pytest.raises(UsageError) as raised:
        load_model(name)
    assert str(raised.value).isprintable()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.json cannot be read: No such file"):
        load_model(str(tmp_path / "absent.json"))


def test_a_directory_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        load_model(str(tmp_path))


def test_a_file_without_end_is_not_read_to_its_end() -> None:
    with pytest.raises(UsageError, match="/dev/zero has more than 1048576 bytes"):
        load_model("/dev/zero")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"num_layers": 2,\n "hidden_size" 8}', " is not JSON: Expecting ':' delimiter: line 2 column 16"),
        (b'{"name": "\xff"}', " is not JSON: 'utf-8' codec can't decode byte 0xff in position 10"),
        ('{"num_layers": 1' + "0" * 5000 + "}", " is not JSON: Exceeds the limit"),
        ('{"num_layers": NaN}', "num_layers is NaN, but must be an integer"),
        ("[1]", " must have a JSON object, but has a list"),
        ("null", " must have a JSON object, but has a NoneType"),
        ('{"name":' * 100_000, " is not JSON: "),
    ],
    ids=range(7),
)
def test_what_is_no_json_object_of_a_model_is_refused(content: str | bytes, why: str, file: Path) -> None:
    assert complaint(file, content).startswith(why)


@pytest.mark.parametrize("field", [field for field in SMALL if field != "num_experts"])
def test_a_missing_field_is_named_with_what_is_allowed(field: str, file: Path) -> None:
    rest = {key: value for key, value in SMALL.items() if key != field}
    most = 100_000 if field.startswith("num_") else 2**31 - 1
    assert complaint(file, rest) == f"{field} is missing; it must be an integer from 1 to {most}"


def test_an_unknown_field_is_told_the_closest_one(file: Path) -> None:
    assert complaint(file, SMALL | {"num_layer": 2}) == '"num_layer" is no field of a model; did you mean num_layers?'


def test_a_field_like_no_other_is_told_all_of_them(file: Path) -> None:
    assert all(field in complaint(file, SMALL | {"zzz": 2}) for field in ModelShape.__dataclass_fields__)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("num_layers", True, "num_layers is true, but must be an integer from 1 to 100000"),
        ("num_layers", "12", 'num_layers is "12", but must be an integer from 1 to 100000'),
        ("num_layers", 12.0, "num_layers is 12.0, but must be an integer from 1 to 100000"),
        ("num_layers", None, "num_layers is null, but must be an integer from 1 to 100000"),
        ("num_layers", 0, "num_layers is 0, but must be an integer from 1 to 100000"),
        ("hidden_size", -8, "hidden_size is -8, but must be an integer from 1 to 2147483647"),
        ("hidden_size", 2**31, "hidden_size is 2147483648, but must be an integer from 1 to 2147483647"),
        ("num_experts", -1, "num_experts is -1, but must be an integer from 0 to 100000"),
        ("kv_lora_rank", 0, "kv_lora_rank is 0, but must be an integer from 1 to 2147483647"),
        ("kv_channels", 0, "kv_channels is 0, but must be an integer from 1 to 2147483647, or null"),
        ("gated_linear_unit", 1, "gated_linear_unit is 1, but must be true or false"),
        ("normalization", 3, 'normalization is 3, but must be "RMSNorm" or "LayerNorm"'),
        ("normalization", "rms", "normalization is 'rms', not RMSNorm or LayerNorm"),
        ("name", "two\nlines", 'name is "two\\nlines", but must be text in quotes, on one line'),
        ("name", "\ud800", 'name is "\\ud800", but must be text in quotes, on one line'),
        ("moe_router_topk", 5, "moe_router_topk is 5, but must be from 1 to num_experts = 4"),
        ("num_query_groups", 3, "num_query_groups is 3, but must divide num_attention_heads = 2"),
        ("hidden_size", 7, "hidden_size 7 is not a multiple of num_attention_heads 2: give kv_channels"),
        (
            "moe_layer_freq",
            [0, 2],
            "moe_layer_freq is [0, 2], but must be an integer from 1 to 100000, or a list with one 0 or 1 per layer",
        ),
        ("moe_layer_freq", [0, 1, 1], "moe_layer_freq must have one 0 or 1 for each of the 2 layers"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(field: str, value: Any, expected: str, file: Path) -> None:
    assert complaint(file, SMALL | {field: value}) == expected


def test_more_experts_than_any_plan_can_hold_are_refused_before_they_are_listed(file: Path) -> None:
    sizes = {"num_layers": 100_000, "num_experts": 100_000}
    assert "make 10000000000 experts, but there must be at most 1000000" in complaint(file, SMALL | sizes)


def test_a_lone_surrogate_in_a_key_is_shown_as_its_escape(file: Path) -> None:
    assert complaint(file, '{"\\ud800": 1}').startswith('"\\ud800" is no field of a model')


def test_a_long_value_is_cut_in_the_message(file: Path) -> None:
    assert len(complaint(file, SMALL | {"hidden_size": ["x" * 1000]})) < 200
