"""What kind of model a configuration of transformers describes, and whether that kind can be trained on text."""

from __future__ import annotations

from typing import Any

from lit_grpo.errors import UserError


def check_kind(config: Any, path: str, where: str) -> None:
    """Refuse by name what is no causal language model; reads the configuration alone.

    Args:
        config: of transformers.
        path: folder or hub name of the model.
        where: key of the configuration that names it.

    Raises:
        UserError: the model is an encoder-decoder; it attends to tokens that an indexer chooses; or it is a multimodal
            one around a language model that transformers does not load as a causal language model.
    """
    # transformers has a class of the decoder alone for BART and its kin, which it fills with half of the weights: what
    # it then writes is not what the model writes. A folder of such a decoder says that it is none.
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"the model {path} is an encoder-decoder (model_type {config.model_type}): one half reads the prompt and "
            "another writes the answer, and a causal language model is needed",
            where=where,
            remedy="give a model that continues a text with one stack of layers, such as Qwen, Llama or SmolLM",
        )
    # What an indexer chooses was measured to depend on the row that the tokens stand in (DeepSeek V3.2: 0.28 nats), and
    # our probe of a few tokens is shorter than the 2,048 that it may choose.
    if getattr(config.get_text_config(), "index_topk", None):
        raise UserError(
            f"the model {path} (model_type {config.model_type}) attends to tokens that an indexer chooses "
            "(index_topk): its log-probabilities in a batch are not those of its own forward pass",
            where=where,
            remedy="give a model that attends to all tokens, such as DeepSeek V3",
        )
    others = [name.removesuffix("_config") for name in getattr(config, "sub_configs", {}) if name != "text_config"]
    if others and not _is_causal(config):
        raise UserError(
            f"the model {path} is multimodal (model_type {config.model_type}, with {' and '.join(others)} beside its "
            "language model), and a causal language model of text is needed",
            where=where,
            remedy=_remedy(config),
        )


def _is_causal(config: Any) -> bool:
    from transformers import AutoModelForCausalLM

    # Code of its own may bring the class, and is asked when the model is loaded.
    own = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    return own or type(config) in AutoModelForCausalLM._model_mapping


def _remedy(config: Any) -> str:
    text = config.get_text_config()
    if text is not config and _is_causal(text):
        return (
            f"give the folder of a text model: this one's language model is a {text.model_type}, and a model of that "
            "model_type trains"
        )
    return "give the folder of a text model, of the same family if it has one (Qwen2.5 in the place of Qwen2.5-VL)"
