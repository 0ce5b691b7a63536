"""Make a tiny random Llama with its own tokenizer and chat template, from files on disk alone.

    python make_tiny_model.py FOLDER

It answers nonsense, at the speed and with the cache behaviour of a real engine. Run by the engine's own Python.
"""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 2_048
CONTEXT_TOKENS = 2_048
SPECIAL = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{{ m['content'] }}{{ '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on sources of the standard library."""
    texts = sorted(str(path) for path in Path(os.__file__).parent.glob("[a-e]*.py"))[:60]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet)
    bpe.train(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=SPECIAL[3:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_TOKENS,
    )


def model() -> LlamaForCausalLM:
    """336 thousand random parameters, the same ones each time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=CONTEXT_TOKENS,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            tie_word_embeddings=False,
            dtype="float32",
        )
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save_pretrained(folder)
    model().save_pretrained(folder)
