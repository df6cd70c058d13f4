"""The decoder compiled, checkpointed and with continuous batching gives what it gives without."""

import pytest
import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig

from stablemask.hf.serving import why_not_continuous
from stablemask.model import StableMaskForCausalLM
from tests.model import tiny

NEW = 8
kinds = pytest.mark.parametrize(("position", "remedy"), tiny.EACH)


def gradients(loss: Tensor, model: StableMaskForCausalLM) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@kinds
def test_checkpointing_changes_no_gradient(position: str, remedy: str) -> None:
    model, ids = tiny.model(position, remedy).train(), tiny.tokens(2, 15)
    expected = gradients(model(ids, labels=ids).loss, model)
    model.activation_checkpointing_enable()
    assert model.is_activation_checkpointing
    for ours, theirs in zip(gradients(model(ids, labels=ids).loss, model), expected, strict=True):
        assert tiny.difference(ours, theirs) <= tiny.EXACT


COMPILED = [("rope", "stablemask"), ("alibi", "stablemask"), ("t5", "learned_sink")]


@pytest.mark.slow
@pytest.mark.parametrize(("position", "remedy"), COMPILED)
def test_one_graph_serves_every_length_and_padding(position: str, remedy: str) -> None:
    """Forward and backward, without a graph break."""
    torch._dynamo.reset()
    model = tiny.model(position, remedy)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (15, 29):
            ids = tiny.tokens(2, length)
            inputs = {
                "labels": ids,
                "attention_mask": (torch.arange(length) >= torch.tensor([[4], [0]])).long(),
            }
            ours, expected = (m(ids, use_cache=False, **inputs).loss for m in (compiled, model))
            assert tiny.difference(ours.detach(), expected.detach()) <= tiny.EXACT
            for a, b in zip(gradients(ours, model), gradients(expected, model), strict=True):
                assert tiny.difference(a, b) <= tiny.EXACT


@kinds
def test_continuous_batching_is_generate_or_refused(position: str, remedy: str) -> None:
    model = tiny.model(position, remedy).float()
    model.generation_config.eos_token_id = None
    prompts = [tiny.tokens(1, length, seed=length) for length in (3, 9, 6)]

    def batched() -> list[list[int]]:
        results = model.generate_batch(
            inputs=[prompt[0].tolist() for prompt in prompts],
            generation_config=GenerationConfig(
                max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=-1, use_cache=False
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=16, num_blocks=16, max_batch_tokens=64, max_requests_per_batch=4
            ),
        )
        return [result.generated_tokens for result in results.values()]

    if why_not_continuous(model) is not None:
        with pytest.raises(ValueError, match="allowed with continuous batching"):
            batched()
        return
    alone = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None)
    expected = [
        model.generate(p, generation_config=alone, attention_mask=torch.ones_like(p))[
            0, p.shape[1] :
        ].tolist()
        for p in prompts
    ]
    assert batched() == expected
