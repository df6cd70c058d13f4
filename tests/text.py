"""A tokenizer trained in the test on a few sentences, and a model for it: nothing is downloaded."""

from functools import cache

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.hf import tiny

SENTENCES = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Question: what falls from the sky in winter?\nAnswer: snow, and sometimes rain.",
    "A stable mask leaves the surplus of attention where nobody reads it.",
)
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('no such role') }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)
VOCABULARY = 140
PRINTABLE = [
    *map(chr, range(0x21, 0x7F)),
    "Ġ",
    "Ċ",
]  # the last two are how ByteLevel writes a space and a newline


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Each of its tokens is ASCII text, so that whatever a random model writes can be cut anywhere."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<end>"],
        initial_alphabet=PRINTABLE,
        show_progress=False,
    )
    trained.train_from_iterator(SENTENCES, trainer)
    special = {"pad_token": "<pad>", "eos_token": "<end>", "bos_token": "<end>"}
    made = PreTrainedTokenizerFast(tokenizer_object=trained, **special)
    made.chat_template = TEMPLATE
    assert len(made) == VOCABULARY
    return made


def llama() -> LlamaForCausalLM:
    """A random Llama with that vocabulary."""
    torch.manual_seed(0)
    config = tiny.config("llama")
    config.vocab_size = VOCABULARY
    config.max_position_embeddings = 512
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.15)
    return model
