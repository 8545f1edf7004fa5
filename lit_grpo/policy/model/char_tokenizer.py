"""A tokenizer of single characters, made on the spot: no download, and every id can be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lit_grpo.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"


def char_tokenizer(alphabet: str = "0123456789+=", pad_is_eos: bool = False) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token for each character of ``alphabet``, then ``<eos>`` and ``<pad>``.

    There is no unknown token: encoding another character raises, since a question with holes is another question.
    ``save_pretrained`` and ``AutoTokenizer.from_pretrained`` give the same tokenizer back.

    Args:
        alphabet: distinct characters; white space counts.
        pad_is_eos: whether padding is ``<eos>``, as in many published tokenizers.

    Raises:
        UserError: the alphabet is empty, or holds a character twice.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    doubles = sorted({c for c in alphabet if alphabet.count(c) > 1})
    if not alphabet or doubles:
        what = f"the alphabet holds {doubles[0]!r} twice" if doubles else "the alphabet is empty"
        raise UserError(what, where="char_tokenizer.alphabet", remedy="name each character once")
    tokens = [*alphabet, EOS] if pad_is_eos else [*alphabet, EOS, PAD]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<none>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=EOS if pad_is_eos else PAD,
        clean_up_tokenization_spaces=False,
    )
