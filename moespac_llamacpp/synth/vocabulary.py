"""A made-up vocabulary of any size with a byte-pair tokenizer, so that text names planted tokens.

A word is a space and four letters, the third a capital: " abCd". The merges (space, a), (C, d), (space a, b), (space ab, Cd)
never compete for a letter, so a word is always one token, and every text of such words has as many tokens as words. All other
text works too, byte by byte.
"""

from __future__ import annotations

import itertools
import string
from dataclasses import dataclass

import gguf

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_symbols() -> list[str]:
    """The printable symbol that stands for each byte in byte-level BPE (that of GPT-2): itself where it is printable."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = itertools.count(0x100)
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


@dataclass(frozen=True)
class Vocabulary:
    """tokens: texts in byte symbols. types: gguf.TokenType of each. words: the ids of the words, `first_word` and up."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    first_word: int

    @property
    def words(self) -> range:
        return range(self.first_word, len(self.tokens) - len(_SPECIAL))

    @property
    def eos(self) -> int:
        return len(self.tokens) - 1

    def text(self, words: list[int]) -> str:
        """The text that tokenizes to these words."""
        return "".join(" " + self.tokens[w][1:] for w in words)

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        writer.add_token_merges(self.merges)
        writer.add_eos_token_id(self.eos)
        writer.add_add_bos_token(False)
        writer.add_chat_template(_TEMPLATE)


def make_vocabulary(n_vocab: int) -> Vocabulary:
    """n_vocab tokens, as many of them words as possible. ValueError: too few for any."""
    letters = next((n for n in range(2, 27) if 256 + n + 2 * n * n + n**4 + len(_SPECIAL) >= n_vocab), 26)
    lower, upper = string.ascii_lowercase[:letters], string.ascii_uppercase[:letters]
    space = byte_symbols()[ord(" ")]
    pairs = [(a, b) for a in upper for b in lower]
    merges = [(space, a) for a in lower] + pairs + [(space + a, b) for a in lower for b in lower]
    n_words = n_vocab - 256 - len(merges) - len(_SPECIAL)
    if not 0 < n_words <= letters**4:
        raise ValueError(f"a vocabulary of {n_vocab} tokens cannot be made of words")
    stems = (space + a + b for a in lower for b in lower)
    words = itertools.islice(((stem, a + b) for stem in stems for a, b in pairs), n_words)
    first_word = 256 + len(merges)
    merges += words
    tokens = [*byte_symbols(), *(a + b for a, b in merges), *_SPECIAL]
    types = [int(gguf.TokenType.NORMAL)] * (n_vocab - len(_SPECIAL)) + [int(gguf.TokenType.CONTROL)] * len(_SPECIAL)
    return Vocabulary(tokens, types, [f"{a} {b}" for a, b in merges], first_word)
