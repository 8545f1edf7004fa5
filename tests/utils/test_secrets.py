"""Secrets by name, by place and by shape; what is none stays as it is."""

from __future__ import annotations

from typing import Any

import pytest

from lit_grpo.utils.secrets import (
    MASK,
    holds_mask,
    is_secret_name,
    masked,
    masked_screen,
    masked_text,
    with_environment,
)


@pytest.mark.parametrize(
    "name",
    ["api_key", "API_KEY", "apiKey", "openai_api_key", "OPENAI-API-KEY", "token", "hf_token", "HF_TOKEN", "auth_token",
     "password", "db_password", "client_secret", "aws_secret_access_key", "private_key", "credentials", "Authorization",
     "model.policy.model_args.token", "use_auth_token", "access_token", "sas_token"],
)  # fmt: skip
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["max_tokens", "micro_batch_tokens", "stop_token_ids", "tokenizer", "token_mean", "eos_token", "pad_token", "key",
     "question_column", "experts_per_token", "max_new_tokens", "seed", "keyword", "top_k", "tokens", "monkey"],
)  # fmt: skip
def test_names_that_are_none(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:pw@host:8000/v1", f"http://{MASK}@host:8000/v1"),
        ("postgresql+psycopg2://u:p%40w@db/x", f"postgresql+psycopg2://{MASK}@db/x"),
        ("https://h/x?api_key=abc&n=1", f"https://h/x?api_key={MASK}&n=1"),
        ("Authorization: Bearer abc.def-123", f"Authorization: Bearer {MASK}"),
        ("got sk-abcdefghij0123456789 back", f"got {MASK} back"),
        ("hf_abcdefghijklmnopqrst", MASK),
        ("http://host:8000/v1?n=1", "http://host:8000/v1?n=1"),
        ("mail me at a@b.c, see http://host/a@b", "mail me at a@b.c, see http://host/a@b"),
        ("a task-sk-ill and hf_short", "a task-sk-ill and hf_short"),
    ],
)
def test_text(text, shown):
    assert masked_text(text) == shown


def test_a_configuration():
    config: dict[str, Any] = {
        "engine": {"args": {"api_key": "s1", "max_num_seqs": 4, "tokens": "plain"},
                   "server": {"env": {"HF_TOKEN": "s2", "ANY_NAME": "s3", "CUDA_VISIBLE_DEVICES": "0"}, "url": "http://a:s4@h"}},
        "rewards": [{"class_path": "X", "init_args": {"url": "https://u:s5@h", "headers": {"Authorization": "s6"}}}],
        "empty": {"password": "", "token": None, "api_key": 7},
    }  # fmt: skip
    shown = masked(config)
    assert not [s for s in ("s1", "s2", "s3", "s4", "s5", "s6") if s in str(shown)]
    assert shown["engine"]["server"]["env"]["CUDA_VISIBLE_DEVICES"] == "0"
    assert shown["engine"]["args"]["max_num_seqs"] == 4
    assert shown["engine"]["args"]["tokens"] == "plain"
    assert shown["empty"] == config["empty"]
    assert config["engine"]["args"]["api_key"] == "s1", "the configuration of the run itself is left alone"
    assert holds_mask(shown) == "engine.args.api_key"
    assert holds_mask(config) is None
    again = with_environment(shown, {"HF_TOKEN": "from outside"})
    assert again["engine"]["server"]["env"]["HF_TOKEN"] == "from outside"
    assert again["engine"]["server"]["env"]["ANY_NAME"] == MASK


@pytest.mark.parametrize(
    "text",
    ["   4 | api_key: s3cret", "command line, --data.engine.args.api_key s3cret", "--x.hf_token=s3cret",
     "{'password': 's3cret'}",
     '{"client_secret": "s3cret", "n": 1}', "url: http://me:s3cret@host"],
)  # fmt: skip
def test_what_a_screen_quotes(text):
    assert "s3cret" not in masked_screen(text)
    assert MASK in masked_screen(text)


@pytest.mark.parametrize(
    "text", ["give the token again", "the password is missing", "max_tokens: 5", "token_mean is 4", "api_key: null"]
)
def test_sentences_stay(text):
    assert masked_screen(text) == text
