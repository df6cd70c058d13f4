"""Which architectures are accepted and refused, and that the printed table says what is measured."""

import json

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig

import stablemask.hf
from stablemask.hf import architectures
from tests.hf import survey, tiny

LINES = json.loads(survey.TABLE.read_text(encoding="utf-8"))


def test_every_architecture_the_laws_run_on_is_in_the_table() -> None:
    assert {name for name, line in LINES.items() if line["supported"]} == set(tiny.SUPPORTED)
    assert {line.name: (line.supported, line.remark) for line in architectures.table()} == {
        name: (line["supported"], line["remark"]) for name, line in LINES.items()
    }


@pytest.mark.parametrize("name", LINES)
def test_the_table_says_what_is_measured(name: str) -> None:
    measured = survey.supported(name) if name in tiny.SUPPORTED else survey.refused(name)
    assert measured == LINES[name], "run python -m tests.hf.survey"


@pytest.mark.parametrize("name", tiny.REFUSED)
def test_enable_and_load_refuse_with_the_reason(name: str, tmp_path: object) -> None:
    model = tiny.model(name)
    with pytest.raises(ValueError, match="computes attention itself"):
        stablemask.hf.enable(model, gamma=0.5, horizon=16)
    model.save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match="computes attention itself"):
        stablemask.hf.load(str(tmp_path), gamma=0.5, horizon=16)


@pytest.mark.parametrize("name", tiny.REFUSED)
def test_an_architecture_with_its_own_attention_fails_loudly_even_when_set_by_name(name: str) -> None:
    """Handed a stock mask function, bloom runs without causality; with ours it stops."""
    config = tiny.config(name)
    config.stablemask = {"version": 1, "gamma": 0.5, "headwise": True, "horizon": 16, "base": 0.0}
    with pytest.raises((KeyError, TypeError)):
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="stablemask")(
            tiny.tokens(1, 5)
        )


def test_an_unlisted_architecture_is_tried_and_accepted() -> None:
    config = transformers.ArceeConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = transformers.ArceeForCausalLM(config).eval()
    assert config.model_type not in LINES
    ids = tiny.tokens(1, 9)
    before = model(ids).logits
    stablemask.hf.enable(model, gamma=0.5, horizon=16)
    assert not torch.equal(model(ids).logits, before)


class OwnConfig(LlamaConfig):
    model_type = "unlisted"


class SkipsTheInterface(LlamaForCausalLM):
    """A model whose second layer keeps its attention to itself."""

    config_class = OwnConfig

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.model.layers[1].self_attn = Identity()


class Identity(nn.Module):
    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        return hidden_states, None


class HasOption(LlamaForCausalLM):
    """A model that passes its attention something unknown."""

    config_class = OwnConfig

    def forward(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        return super().forward(*args, **kwargs, score_shift=1.0)


class OwnMask(LlamaForCausalLM):
    """A model that makes its mask without the interface."""

    config_class = OwnConfig

    def forward(self, input_ids: Tensor, **kwargs: object) -> object:  # type: ignore[override]
        mask = torch.ones(
            1, 1, input_ids.shape[1], input_ids.shape[1], dtype=torch.bool, device=input_ids.device
        )
        return super().forward(input_ids, **{**kwargs, "attention_mask": mask.tril()})


@pytest.mark.parametrize(
    ("model_class", "reason"),
    [
        (SkipsTheInterface, "2 layers call the registered attention 1 times"),
        (HasOption, "score_shift"),
        (OwnMask, "does not make its mask through the registered mask function"),
    ],
)
def test_an_unlisted_architecture_that_does_not_fit_is_refused(model_class: type, reason: str) -> None:
    config = OwnConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    with pytest.raises(ValueError, match=reason):
        stablemask.hf.enable(model_class(config), gamma=0.5, horizon=16)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"is_causal": False}, "not causal"),
        ({"attention_chunk_size": 8}, "cut into chunks"),
        ({"is_encoder_decoder": True}, "attends to an encoder"),
    ],
)
def test_a_config_that_changes_the_attention_is_refused(change: dict[str, object], reason: str) -> None:
    model = tiny.model("llama")
    model.config.update(change)
    with pytest.raises(ValueError, match=reason):
        stablemask.hf.enable(model, gamma=0.5, horizon=16)


def test_a_model_made_of_several_is_refused_and_its_language_model_is_not() -> None:
    text = transformers.Gemma3TextConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=8,
    )
    vision = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    model = transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(text_config=text, vision_config=vision)
    )
    with pytest.raises(ValueError, match="switch StableMask on in its language model"):
        stablemask.hf.enable(model, gamma=0.5, horizon=16)
    stablemask.hf.enable(model.model.language_model, gamma=0.5, horizon=16)
