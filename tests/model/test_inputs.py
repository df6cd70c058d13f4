"""What a forward pass refuses, by name; and the losses and outputs around it."""

import pytest
import torch
from accelerate.utils import send_to_device
from transformers import DynamicCache

from stablemask.model import StreamingLLMCache
from stablemask.model.inputs import Terms
from stablemask.model.positions import Rotation
from tests.model import tiny

IDS = tiny.tokens(2, 8)


def test_tokens_or_embeddings() -> None:
    model = tiny.model()
    with pytest.raises(ValueError, match="input_ids, inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="input_ids, inputs_embeds"):
        model(IDS, inputs_embeds=model.model.embed_tokens(IDS))


@pytest.mark.parametrize("shape", [(2, 7), (1, 8), (2, 9), (2, 8, 8)])
def test_a_mask_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="attention_mask: got"):
        tiny.model()(IDS, attention_mask=torch.ones(shape, dtype=torch.long), use_cache=False)


def test_a_mask_of_the_new_tokens_alone() -> None:
    model, cache = tiny.model(), DynamicCache()
    model(IDS, past_key_values=cache)
    with pytest.raises(ValueError, match="attention_mask: got 8 columns; allowed: 16"):
        model(IDS, attention_mask=torch.ones_like(IDS), past_key_values=cache)


@pytest.mark.parametrize("shape", [(8,), (2, 7), (3, 8)])
def test_positions_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="position_ids: got shape"):
        tiny.model()(IDS, position_ids=torch.zeros(shape, dtype=torch.long))


def test_packed_tokens_and_a_cache() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    with pytest.raises(ValueError, match=r"position_ids: got several documents.*use_cache=False"):
        tiny.model()(IDS, position_ids=positions)


def test_a_whole_mask_and_artificial_tokens() -> None:
    with pytest.raises(ValueError, match="attention_mask: got rank 4"):
        tiny.model(remedy="artificial_token")(IDS, attention_mask=torch.ones(2, 1, 8, 8, dtype=torch.bool))


def test_attention_weights_are_not_to_be_had() -> None:
    with pytest.raises(ValueError, match="output_attentions: got True"):
        tiny.model()(IDS, output_attentions=True)


@torch.no_grad()
@pytest.mark.parametrize(
    ("position", "remedy"), [("learned", "stablemask"), ("rope", "urpe"), ("learned", "artificial_token")]
)
def test_a_table_ends(position: str, remedy: str) -> None:
    model = tiny.model(position, remedy, max_position_embeddings=10)
    ids = tiny.tokens(1, 11)
    model(ids[:, :10])
    with pytest.raises(ValueError, match="position_ids: got 10; allowed: below 10 = max_position_embeddings"):
        model(ids)
    cache = DynamicCache()
    model(ids[:, :10], past_key_values=cache)
    with pytest.raises(ValueError, match="position_ids: got 10"):
        model(ids[:, 10:], past_key_values=cache)
    with pytest.raises(ValueError, match="position_ids: got 12"):
        model(ids[:, :3], position_ids=torch.tensor([[10, 11, 12]]), use_cache=False)


@pytest.mark.parametrize("position", ["learned", "sinusoidal"])
def test_positions_that_cannot_move(position: str) -> None:
    with pytest.raises(ValueError, match="past_key_values: got StreamingLLMCache"):
        tiny.model(position)(IDS, past_key_values=StreamingLLMCache(pinned=2, window=20))


@torch.no_grad()
def test_only_the_logits_asked_for() -> None:
    model = tiny.model()
    every = model(IDS).logits
    assert tiny.difference(model(IDS, logits_to_keep=3).logits, every[:, -3:]) < tiny.EXACT
    assert (
        tiny.difference(model(IDS, logits_to_keep=torch.tensor([1, 5])).logits, every[:, [1, 5]]) < tiny.EXACT
    )
    assert torch.equal(model(IDS, return_dict=False)[0], every)


@torch.no_grad()
def test_the_loss_is_that_of_transformers() -> None:
    model = tiny.model(remedy="artificial_token")
    labels = IDS.clone()
    labels[0, :4] = -100
    out = model(IDS, labels=labels)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert float(out.loss) == pytest.approx(float(expected), rel=1e-6)
    summed = model(IDS, labels=labels, num_items_in_batch=torch.tensor(5))
    assert float(summed.loss) == pytest.approx(float(expected) * 11 / 5, rel=1e-6)


def test_terms_move_between_devices() -> None:
    """As accelerate does with what a layer gets, where the layers are on several devices."""
    rotation = Rotation(torch.zeros(2), torch.ones(2))
    moved = send_to_device(Terms(rotation, None, torch.zeros(4), None, torch.zeros(1, 4, 3)), "meta")
    assert moved.rotation.cos.is_meta
    assert moved.rotation.sin.is_meta
    assert moved.slopes.is_meta
    assert moved.sink.is_meta
    assert moved.key_rotation is None
