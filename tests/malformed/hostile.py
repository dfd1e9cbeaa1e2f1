"""Files made to run code, to lead elsewhere or never to end. Each plants a canary: a file that its code would write."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tests.malformed.case import Case, Make, copied, file, keys_set, pipe
from tests.malformed.models import ADAPTER, CONFIG, TOKENIZER_CONFIG, WEIGHTS, index
from tests.malformed.runs import BEFORE, GOOD, LAST, RUN, entry, progress, sign, signed

CANARY = "canary"
WORKS = "training prompts"  # in what is printed where the hostile part is ignored and the rest works
CODE = f"open({CANARY!r}, 'w')\nclass Config: pass\nclass Tokenizer: pass\n"


class Bomb:
    """Writes the canary when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(Path(CANARY).absolute()), "w")


def pickled(name: str) -> Make:
    return lambda: file(name, pickle.dumps(Bomb()))()


def saved(name: str) -> Make:
    """As torch saves: a ZIP archive with a pickle in it."""
    return lambda: (Path(name).unlink(missing_ok=True), torch.save({"w": Bomb()}, name))


def module(name: str) -> Make:
    return file(name, CODE)


def gone(name: str) -> Make:
    return lambda: Path(name).unlink()


def model(name: str, says: str, *changes: Make) -> Case:
    words = ("model=bad", "--dry-run") if says == WORKS else ("model=bad",)
    return Case(name, says, words, copied("model", "bad", *changes))


def adapter(name: str, says: str, *changes: Make) -> Case:
    words = ("model=bad", "--dry-run") if says == WORKS else ("model=bad",)
    return Case(f"adapter {name}", says, words, copied("adapter", "bad", *changes))


def resumed(name: str, says: str, *changes: Make, more: tuple[str, ...] = ()) -> Case:
    return Case(f"run {name}", says, ("train", f"resume={RUN}", "steps=3", *more), copied("whole", RUN, *changes))


def link(name: str, target: str) -> Make:
    return lambda: Path(name).symlink_to(Path(target).absolute())


PICKLES = [
    model("pytorch_model.bin alone", "pickle", gone(WEIGHTS), pickled("bad/pytorch_model.bin")),
    model("pytorch_model.bin as torch saves it", "pickle", gone(WEIGHTS), saved("bad/pytorch_model.bin")),
    model("pytorch_model.bin beside", WORKS, saved("bad/pytorch_model.bin")),
    model(
        "an index of shards that are pickles",
        "pickle",
        gone(WEIGHTS),
        saved("bad/pytorch_model-00001-of-00001.bin"),
        file("bad/pytorch_model.bin.index.json", '{"weight_map": {"w": "pytorch_model-00001-of-00001.bin"}}'),
    ),
    model(
        "what a trainer leaves beside",
        WORKS,
        saved("bad/training_args.bin"),
        saved("bad/optimizer.pt"),
        saved("bad/scheduler.pt"),
        pickled("bad/rng_state.pth"),
    ),
    model("model.safetensors that is a pickle", "broken", pickled(WEIGHTS)),
    model("model.safetensors that is a ZIP with a pickle", "broken", saved(WEIGHTS)),
    model(
        "model.safetensors that leads to a pickle", "broken", pickled("x.bin"), gone(WEIGHTS), link(WEIGHTS, "x.bin")
    ),
    model("tokenizer.json that is a pickle", "tokenizer", pickled("bad/tokenizer.json")),
    model("tokenizer.model that is a pickle", WORKS, pickled("bad/tokenizer.model")),
    Case("a GGUF file that is a pickle", "bad.gguf", ("model=bad.gguf",), pickled("bad.gguf")),
    Case("a GGUF file that is a ZIP with a pickle", "bad.gguf", ("model=bad.gguf",), saved("bad.gguf")),
    Case("a model that is a pickle", "bad.pt", ("model=bad.pt",), saved("bad.pt")),
    adapter("adapter_model.bin alone", "pickle", gone(ADAPTER), pickled("bad/adapter_model.bin")),
    adapter("adapter_model.bin beside", WORKS, saved("bad/adapter_model.bin")),
    adapter("weights that are a pickle", "broken", pickled(ADAPTER)),
    *(
        Case(f"data in a pickle, {end}", end, (f"data=bad{end}",), pickled(f"bad{end}"))
        for end in (".npy", ".npz", ".pkl", ".pt")
    ),
    Case("data in a pickle, .parquet", "bad.parquet", ("data=bad.parquet",), pickled("bad.parquet")),
]

INDEXES = [
    model("an index that leads up", "beside it", index({"weight_map": {"w": "../model/model.safetensors"}})),
    model("an index that leads up and down", "beside it", index({"weight_map": {"w": "x/../model.safetensors"}})),
    model("an index that leads anywhere", "beside it", index({"weight_map": {"w": "/etc/passwd"}})),
    model("an index of pickles", "beside it", index({"weight_map": {"w": "x.bin"}}), pickled("bad/x.bin")),
]

AUTO = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Config"}
REMOTE = [
    model("a config with code", "auto_map", keys_set(CONFIG, auto_map=AUTO), module("bad/evil.py")),
    model(
        "a part of a config with code",
        "auto_map",
        keys_set(CONFIG, text_config={"auto_map": AUTO}),
        module("bad/evil.py"),
    ),
    model(
        "a config with code of another repository",
        "auto_map",
        keys_set(CONFIG, auto_map={"AutoConfig": "a/b--evil.Config"}),
    ),
    model(
        "a config of a new kind", "model_type", keys_set(CONFIG, model_type="evil"), module("bad/configuration_evil.py")
    ),
    model(
        "code that nothing names",
        WORKS,
        *(module(f"bad/{name}.py") for name in ("modeling_llama", "torch", "json", "__init__")),
    ),
    model(
        "a tokenizer with code",
        "auto_map",
        keys_set(TOKENIZER_CONFIG, auto_map={"AutoTokenizer": ["evil.Tokenizer", None]}),
        module("bad/evil.py"),
    ),
    model(
        "a tokenizer of its own class",
        WORKS,
        keys_set(TOKENIZER_CONFIG, tokenizer_class="Tokenizer"),
        module("bad/tokenization_tokenizer.py"),
    ),
    model("attention from the hub", "attn_implementation", keys_set(CONFIG, attn_implementation="owner/kernel")),
    model(
        "attention from the hub, inside",
        "_attn_implementation",
        keys_set(CONFIG, _attn_implementation="owner/kernel:f"),
    ),
    model("attention for each part", "attn_implementation", keys_set(CONFIG, attn_implementation={"": "owner/kernel"})),
    model("experts from the hub", "experts_implementation", keys_set(CONFIG, experts_implementation="owner/kernel")),
    model(
        "a generation config with code",
        WORKS,
        keys_set("bad/generation_config.json", custom_generate="evil"),
        module("bad/custom_generate/generate.py"),
    ),
    model(
        "a processor with code",
        WORKS,
        file("bad/processor_config.json", json.dumps({"auto_map": {"AutoProcessor": "evil.Config"}})),
        module("bad/evil.py"),
    ),
    model(
        "a quantised model with code",
        "quantised",
        keys_set(CONFIG, quantization_config={"quant_method": "evil", "modules": "evil.Config"}),
        module("bad/evil.py"),
    ),
    adapter(
        "of a base with code",
        "auto_map",
        copied("model", "base", keys_set("base/config.json", auto_map=AUTO), module("base/evil.py")),
        keys_set("bad/adapter_config.json", base_model_name_or_path="base"),
    ),
    adapter("with code", "auto_map", keys_set("bad/adapter_config.json", auto_map=AUTO), module("bad/evil.py")),
    adapter(
        "with a class to import",
        WORKS,
        keys_set("bad/adapter_config.json", auto_mapping={"base_model_class": "Config", "parent_library": "evil"}),
        module("bad/evil.py"),
    ),
    adapter("with a custom module", "custom", keys_set("bad/adapter_config.json", custom_modules={"evil": "Config"})),
]


def template(text: str) -> Case:
    make = keys_set(TOKENIZER_CONFIG, chat_template=text)
    return Case(f"template {text}"[:60], "chat template", ("model=bad", "chat=true"), copied("model", "bad", make))


TOUCH = f"open({CANARY!r}, 'w')"
TEMPLATES = [
    template("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    template(f"{{{{ cycler.__init__.__globals__.__builtins__.{TOUCH} }}}}"),
    template(f"{{{{ raise_exception.__globals__['__builtins__'].{TOUCH} }}}}"),
    template(f"{{{{ lipsum.__globals__.__builtins__.{TOUCH} }}}}"),
    template(f"{{{{ self.__init__.__globals__.__builtins__.{TOUCH} }}}}"),
    template("{{ (messages | attr('__class__')).__mro__ }}"),
    template("{{ '{0.__class__.__mro__}'.format(messages).x() }}"),
    template("{{ messages.append({}) }}"),
    template("{% include '/etc/passwd' %}"),
    template("{% import 'evil.py' as evil %}"),
    template("{% for i in range(10**9) %}{% endfor %}"),
    template("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
    template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
    Case(
        "template in a file of its own",
        "chat template",
        ("model=bad", "chat=true"),
        copied("model", "bad", file("bad/chat_template.jinja", "{{ ''.__class__.__mro__[1].__subclasses__() }}")),
    ),
]


def extension(columns: dict[str, Any]) -> Make:
    """Arrow once unpickled the type of a column of this name when it read a file."""

    def make() -> None:
        about = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickle.dumps(Bomb(), 0)}
        table = pa.table(columns)
        evil = pa.field("evil", pa.string(), metadata=about)
        table = table.append_column(evil, pa.array(["x"] * len(table)))
        pq.write_table(table, "bad.parquet")

    return make


COLUMNS = [
    Case(
        "a Parquet column with a pickled type",
        WORKS,
        ("data=bad.parquet", "--dry-run"),
        extension({"prompt": ["1+1=", "2+1="], "answer": ["2", "3"]}),
    ),
    Case(
        "recorded rows with a pickled type",
        "replaying",
        ("sampler=replay:bad.parquet", "!data", "!reward", "--dry-run"),
        extension(GOOD),
    ),
]


def listed(**values: Any) -> Make:
    """A manifest that is right but for one more file in it."""
    return lambda: sign([entry(LAST, "config.json"), {"path": "x", "bytes": 0, "sha256": EMPTY, **values}])


EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # of no bytes
RUNS = [
    resumed(
        "with a pickle for an optimizer",
        "optimizer.safetensors",
        pickled(f"{LAST}/trainer/optimizer.safetensors"),
        signed,
    ),
    resumed(
        "with pickles beside",
        "steps 3 to 3",
        saved(f"{LAST}/trainer/optimizer.pt"),
        pickled(f"{LAST}/training_args.bin"),
        signed,
    ),
    resumed("with a model that is a pickle", "broken", saved(f"{LAST}/model.safetensors"), signed),
    resumed(
        "with a model with code",
        "auto_map",
        keys_set(f"{LAST}/config.json", auto_map=AUTO),
        module(f"{LAST}/evil.py"),
        signed,
    ),
    resumed(
        "with a template for a tokenizer",
        "steps 3 to 3",
        file(f"{LAST}/chat_template.jinja", "{{ x.__class__ }}"),
        signed,
    ),
    resumed("whose state holds a path", "state.json", progress(best_step="../../../x"), signed),
    resumed(
        "whose state holds a path for a number", "state.json", progress(tokens_per_microbatch="/etc/passwd"), signed
    ),
    resumed("whose algorithm holds a path", "state.json", progress(algorithm={"x": "/etc/passwd"}), signed),
    resumed("whose manifest leads up", "steps 2 to 3", listed(path="../../../../reward.py")),
    resumed("whose manifest leads to a device", "steps 2 to 3", listed(path="/dev/zero")),
    resumed("whose manifest leads to a pipe", "steps 2 to 3", listed(path="pipe"), pipe(f"{LAST}/pipe")),
    resumed("whose manifest has wrong kinds", "steps 2 to 3", listed(path=["a"])),
    resumed("with a link for a newer checkpoint", "steps 3 to 3", link(f"{RUN}/checkpoints/step_000099", ".")),
    resumed(
        "with a link for an older checkpoint",
        "steps 3 to 3",
        lambda: Path(BEFORE).rename("elsewhere"),
        link(BEFORE, "elsewhere"),
        more=("keep_checkpoints=1",),
    ),
    resumed("with rollouts that are a pickle", "steps 3 to 3", pickled(f"{RUN}/rollouts/step_000003.parquet")),
    resumed(
        "with a Python object in its config",
        "config.yaml",
        file(f"{RUN}/config.yaml", f"algorithm: !!python/object/apply:builtins.open [{CANARY}, w]\n"),
    ),
    Case(
        "recipe with a Python object",
        "bad.yaml",
        ("train", "bad.yaml"),
        file("bad.yaml", f"algorithm: !!python/object/apply:builtins.open [{CANARY}, w]\n"),
    ),
]
CASES = [*PICKLES, *INDEXES, *REMOTE, *TEMPLATES, *COLUMNS, *RUNS]
