"""A small Llama of `transformers` and files to tune it on."""

import json

import pytest
from helpers.fine_tuning import ASKED, SAMPLES

from models.byte_tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A directory of `transformers` with a small Llama of random weights."""
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    path, tokenizer = tmp_path_factory.mktemp("llama"), byte_tokenizer()
    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(shape).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def data(tmp_path):
    def write(kind):
        path = tmp_path / f"{kind}.jsonl"
        path.write_text("".join(json.dumps(SAMPLES[kind](*asked)) + "\n" for asked in ASKED))
        return path

    return write
