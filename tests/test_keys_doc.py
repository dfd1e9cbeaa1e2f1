"""docs/keys.md is the list of keys that work: every one, no other, with the defaults that the code has."""

from pathlib import Path

from pydantic import BaseModel

from hotcold.algorithms.options import CONDITIONAL
from hotcold.algorithms.presets import PRESETS
from hotcold.config.foreign import FOREIGN
from hotcold.config.keys import ALGORITHM_KEYS, EVAL_KEYS, LATER_KEYS, SAMPLE_KEYS, TRAIN_KEYS, Key
from hotcold.config.schema import Config, EvalConfig, SampleConfig, Settings

DOC = Path(__file__).parents[1] / "docs" / "keys.md"
SAME_IN_TRL = {"model", "reward_weights", "learning_rate", "max_grad_norm", "warmup_steps", "temperature"}
SAME_IN_TRL |= {"top_p", "top_k", "min_p", "seed", "beta", "gamma", "lam", "gradient_checkpointing"}


def documented(verb: str) -> dict[str, list[str]]:
    """Key -> the other cells of its row, of the tables under `## verb`."""
    section = DOC.read_text().split(f"\n## {verb}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return {row[0].strip(" `"): [cell.strip() for cell in row[1:]] for row in rows}


def keys_of(groups: dict[str, tuple[Key, ...]]) -> list[Key]:
    return [key for keys in groups.values() for key in keys]


def fields(cls: type[BaseModel]) -> dict[str, object]:
    """Dotted name -> default of every field a user can set."""
    defaults: dict[str, object] = {}
    for name, field in cls.model_fields.items():
        if isinstance(field.default, BaseModel):
            defaults |= {f"{name}.{inner}": value for inner, value in field.default}
        elif name not in ("reasons", "algorithm_options"):
            defaults[name] = field.default
    long = {"data.path": "data", "mismatch.mode": "mismatch"}  # shown by their short names
    return {long.get(key, key): value for key, value in defaults.items()}


def plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def names_of(ours: str, library: str) -> str:
    same = [ours] if library == "TRL" and ours in SAME_IN_TRL else []
    rows = [row.name for row in FOREIGN if row.ours == ours and library in row.library.split(", ")]
    return ", ".join(f"`{name.removeprefix('actor_rollout_ref.')}`" for name in same + rows) or "-"


def test_every_key_of_train_is_documented_with_its_default_meaning_and_foreign_names() -> None:
    expected = {
        key.name: [key.default, key.meaning, names_of(key.name, "TRL"), names_of(key.name, "verl")]
        for key in keys_of(TRAIN_KEYS)
    }
    assert documented("train") == expected


def test_every_key_of_eval_and_sample_is_documented() -> None:
    for verb, groups in (("eval", EVAL_KEYS), ("sample", SAMPLE_KEYS)):
        assert documented(verb) == {key.name: [key.default, key.meaning] for key in keys_of(groups)}


def test_the_table_of_keys_has_the_fields_of_the_config_and_no_other() -> None:
    for cls, groups in ((EvalConfig, EVAL_KEYS), (SampleConfig, SAMPLE_KEYS)):
        assert {key.name for key in keys_of(groups)} == set(fields(cls))
    assert {key.name for key in keys_of(TRAIN_KEYS)} == set(fields(Config)) | ALGORITHM_KEYS
    assert not ALGORITHM_KEYS & set(fields(Config))


def test_shown_defaults_are_the_defaults() -> None:
    pairs: list[tuple[type[Settings], dict[str, tuple[Key, ...]]]] = [
        (Config, TRAIN_KEYS),
        (EvalConfig, EVAL_KEYS),
        (SampleConfig, SAMPLE_KEYS),
    ]
    for cls, groups in pairs:
        defaults = fields(cls)
        for key in keys_of(groups):
            default = defaults.get(key.name)
            if default is not None and isinstance(default, int | float | str):
                assert key.default == plain(default), key.name


def test_shown_defaults_of_the_algorithms_keys_are_those_of_the_presets() -> None:
    table = {key.name: key.default for key in keys_of(TRAIN_KEYS)}
    values: dict[str, set[str]] = {}
    for name, preset in PRESETS.items():
        assert set(preset.values) <= ALGORITHM_KEYS, f"{name} has a key that is not in the table"
        for key, value in preset.values.items():
            values.setdefault(key, set()).add(plain(value))
    for key, found in values.items():
        if table[key] == "by algorithm":
            assert len(found) > 1, f"{key} has one default: show it"
        else:
            assert found == {table[key].split(" ")[0]}, key


def test_shown_defaults_of_conditional_keys_are_those_they_get() -> None:
    table = {key.name: key.default for key in keys_of(TRAIN_KEYS)}
    assert set(CONDITIONAL) <= set(table)
    for key, condition in CONDITIONAL.items():
        assert table[key] in (plain(condition.default), "by algorithm"), key


def test_no_key_of_a_later_version_is_in_the_docs_or_the_table() -> None:
    words = set(DOC.read_text().replace("`", " ").replace("=", " ").split())
    assert not {key for key in LATER_KEYS if key in words}
    assert not LATER_KEYS & {key.name for key in keys_of(TRAIN_KEYS)}


def test_each_foreign_key_leads_to_a_key_that_exists() -> None:
    known = {key.name for key in keys_of(TRAIN_KEYS)}
    assert {row.ours for row in FOREIGN} - {""} <= known
    assert not {row.name for row in FOREIGN} & known
