"""A folder saved with StableMask opens as StableMask or not at all."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import stablemask.hf
from tests.hf import tiny

PARAMETERS: dict[str, Any] = {"gamma": 0.5, "horizon": 16}
IDS = tiny.tokens(1, 19)
MESSAGE = "This model has StableMask"


def enabled(name: str = "llama") -> PreTrainedModel:
    model = tiny.model(name)
    stablemask.hf.enable(model, **PARAMETERS)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved llama, with the logits it gives beside it."""
    path = tmp_path_factory.mktemp("saved") / "model"
    model = enabled()
    model.save_pretrained(path)
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    torch.save({"ids": IDS, "right": model(IDS).logits.detach()}, path.parent / "expected.pt")
    return path


@pytest.mark.parametrize("name", tiny.SUPPORTED)
def test_every_architecture_comes_back_the_same(name: str, tmp_path: Path) -> None:
    model = enabled(name)
    model.save_pretrained(tmp_path)
    for opened in (
        stablemask.hf.load(str(tmp_path)),
        AutoModelForCausalLM.from_pretrained(tmp_path),
        AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True),
    ):
        assert type(opened) is type(model)
        assert opened.config.stablemask == model.config.stablemask
        assert torch.equal(opened(IDS).logits, model(IDS).logits)


def test_saving_again_keeps_everything(folder: Path, tmp_path: Path) -> None:
    first = stablemask.hf.load(str(folder))
    first.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )
    assert torch.equal(stablemask.hf.load(str(tmp_path))(IDS).logits, enabled()(IDS).logits)


def test_switched_off_it_is_saved_as_a_stock_model(folder: Path, tmp_path: Path) -> None:
    model, stock = stablemask.hf.load(str(folder)), tiny.model("llama")
    stablemask.hf.disable(model)
    model.save_pretrained(tmp_path / "off")
    stock.save_pretrained(tmp_path / "stock")
    texts = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("off", "stock")]
    assert texts[0] == texts[1]
    opened = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "off")
    assert torch.equal(opened(IDS).logits, stock(IDS).logits)


def test_labels_and_names_survive_the_seal(tmp_path: Path) -> None:
    config = tiny.config("llama")
    config.id2label = {0: "bad", 1: "good", 2: "neither"}
    model = transformers.LlamaForSequenceClassification(config)
    stablemask.hf.enable(model, **PARAMETERS)
    model.save_pretrained(tmp_path)
    opened = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert opened.config.id2label == config.id2label
    assert opened.config.architectures == ["LlamaForSequenceClassification"]
    assert opened.config.model_type == "llama"


def test_in_this_process_the_class_of_the_architecture_raises(folder: Path) -> None:
    with pytest.raises(StrictDataclassFieldValidationError, match=MESSAGE):
        transformers.LlamaForCausalLM.from_pretrained(folder)
    with pytest.raises(StrictDataclassFieldValidationError, match=MESSAGE):
        transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    with pytest.raises(ValueError, match=r"call stablemask\.hf\.disable"):
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    with pytest.raises(ValueError, match=r"call stablemask\.hf\.disable"):
        AutoModelForCausalLM.from_pretrained(
            folder, config=AutoConfig.from_pretrained(folder), attn_implementation="eager"
        )


def test_load_says_what_it_needs(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has its own; change them with enable"):
        stablemask.hf.load(str(folder), **PARAMETERS)
    with pytest.raises(ValueError, match="the attention is StableMask"):
        stablemask.hf.load(str(folder), attn_implementation="sdpa")
    tiny.model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="both must be given"):
        stablemask.hf.load(str(tmp_path), gamma=0.5)
    with pytest.warns(UserWarning, match="AnnealBase"):
        model = stablemask.hf.load(str(tmp_path), **PARAMETERS, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.config.stablemask["horizon"] == 16


OPENERS = {
    "the auto class": "T.AutoModelForCausalLM.from_pretrained(PATH)",
    "the auto class, told sdpa": "T.AutoModelForCausalLM.from_pretrained(PATH, attn_implementation='sdpa')",
    "the auto class, not to trust": "T.AutoModelForCausalLM.from_pretrained(PATH, trust_remote_code=False)",
    "the auto class without a head": "T.AutoModel.from_pretrained(PATH)",
    "the auto config": "T.AutoConfig.from_pretrained(PATH)",
    "a pipeline": "T.pipeline('text-generation', model=PATH)",
    "the class": "T.LlamaForCausalLM.from_pretrained(PATH)",
    "the class, told sdpa": "T.LlamaForCausalLM.from_pretrained(PATH, attn_implementation='sdpa')",
    "a related class": "T.MistralForCausalLM.from_pretrained(PATH)",
    "the config class": "T.LlamaConfig.from_pretrained(PATH)",
}
TRUSTED = "T.AutoModelForCausalLM.from_pretrained(PATH, trust_remote_code=True)"

FRESH_PROCESS = """
import json, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
PATH, BLOCKED, expressions = json.loads(sys.stdin.read())
sys.meta_path.insert(0, Block())
import torch, transformers as T
sys.stdin = open("/dev/null")
found = {}
for name, expression in expressions.items():
    try:
        opened = eval(expression)
        found[name] = "opened"
    except Exception as error:
        found[name] = type(error).__name__ + ": " + str(error)
    assert name == "trusted" or "stablemask" not in sys.modules
if found.get("trusted") == "opened":
    ids, right = torch.load(PATH + "/../expected.pt").values()
    found["trusted"] = "right" if torch.allclose(opened.eval()(ids).logits, right, atol=1e-5) else "wrong"
print("\\n" + json.dumps(found))
"""


def in_a_fresh_process(
    folder: Path, expressions: dict[str, str], blocked: tuple[str, ...] = ()
) -> dict[str, str]:
    """What comes of each expression in an interpreter that has not imported us."""
    done = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS],
        input=json.dumps([str(folder), blocked, expressions]),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(folder.parent / "modules")},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_process_without_us_gets_an_error_or_the_right_model(folder: Path) -> None:
    tokenizer = {"tokenizer": "print(T.AutoTokenizer.from_pretrained(PATH)('b').input_ids)"}
    found = in_a_fresh_process(folder, {**tokenizer, **OPENERS, "trusted": TRUSTED})
    assert found["tokenizer"] == "opened", found
    assert found["trusted"] == "right"
    for name in OPENERS:
        assert (MESSAGE if "auto" not in name and name != "a pipeline" else "custom code") in found[name], (
            found
        )


@pytest.mark.slow
def test_without_the_package_the_error_says_what_to_install(folder: Path) -> None:
    found = in_a_fresh_process(folder, {"trusted": TRUSTED}, blocked=("stablemask",))
    assert "pip install stablemask" in found["trusted"]


def test_the_model_card_says_how_to_open_it_and_what_remains_possible(folder: Path) -> None:
    card = (folder / "README.md").read_text(encoding="utf-8")
    for phrase in ("stablemask.hf.load", "trust_remote_code=True", "What remains possible", "'horizon': 16"):
        assert phrase in card


def test_a_model_card_that_is_there_keeps_its_text(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text("# Mine\n\nwords\n", encoding="utf-8")
    model = enabled()
    model.save_pretrained(tmp_path)
    first = card.read_text(encoding="utf-8")
    card.write_text(first + "\n## Training data\n\nbooks\n", encoding="utf-8")
    stablemask.hf.enable(model, gamma=0.25, horizon=16)
    model.save_pretrained(tmp_path)
    second = card.read_text(encoding="utf-8")
    assert first.startswith("# Mine\n\nwords\n")
    assert second.startswith("# Mine\n\nwords\n")
    assert "## Training data\n\nbooks" in second
    assert second.count("## StableMask") == 1
    assert "'gamma': 0.25" in second
    assert "'gamma': 0.5" not in second


def test_what_remains_possible_is_possible(folder: Path) -> None:
    """The card names it: weights read into a model that was built otherwise."""
    stock = transformers.LlamaForCausalLM(tiny.config("llama")).eval()
    stock.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not torch.allclose(stock(IDS).logits, enabled()(IDS).logits, atol=1e-2)
