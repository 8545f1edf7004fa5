"""Formulas as the recipes write them, in one line of plain text, as LaTeX for the documents.

``-(1/N) Σ_i min(s_i A_i, clip(s_i)A_i)`` is read in a configuration's comment and in a docstring as it stands. A page
shows it typeset: GitHub does that itself, and docs_site.py for the site.
"""

from __future__ import annotations

import re

_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "Δ": "Delta", "ε": "epsilon", "η": "eta", "λ": "lambda",
    "μ": "mu", "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau",
}  # fmt: skip
_SIGNS = {
    "\x01": r"\dfrac{",
    "\x02": "}{",
    "\x03": "}",
    "±": r"\pm",
    "½": r"\tfrac{1}{2}",
    "²": "^2",
    "<": "<",
    ">": ">",
}
_FUNCTIONS = ("min", "max", "clip", "exp", "log", "sign", "sg", "sigmoid", "mean", "GAE", "NLL", "overlong")
_NAMES = ("KL", "GMPO", "cap")
# Of two letters, and two indices and no word.
_INDICES = ("it",)

_TOKEN = re.compile(
    r"(?P<sum>Σ(?:_(?:\{(?P<set>[^}]*)\}|(?P<index>[a-z])))?)"
    r"|(?P<mean_entropy><H>(?:_(?P<of>[a-z]))?)"
    r"|(?P<size>\|A[+-]?\|)"
    # ``A+`` are the right completions, ``B-`` the tokens of the wrong ones; a sum has a space before its sign.
    r"|(?P<part>[ABλ][+-](?=[)}\x03\s]|$))"
    r"|(?P<name>(?P<word>[A-Za-z]{2,}(?:[-'][a-z]+)*|[A-Za-z]|[αβγδΔεηλμπρστ])(?P<prime>'?)(?:_(?P<below>[A-Za-z]+))?)"
    r"|(?P<number>\d*\.?\d+)"
    r"|(?P<other><=|\s+|.)"
)


def to_markdown(formula: str) -> str:
    """Convert one formula of a recipe to text with LaTeX between dollars; the words between its terms stay words.

    Each part that stands alone is a formula of its own, so that a line can end between two of them.

    Raises:
        ValueError: a character has no meaning here.
    """
    out: list[str] = []
    tex: list[str] = []
    prose: list[str] = []
    depth = bars = 0

    def end_prose() -> None:
        if prose:
            words = " ".join(prose)
            # Between brackets the words belong to the formula.
            if depth:
                tex.append(rf"\text{{ {words} }}")
            else:
                end_formula()
                out.append(words)
            prose.clear()

    def end_formula() -> None:
        if tex:
            out.append("$" + " ".join(tex) + "$")
            tex.clear()

    matches = list(_TOKEN.finditer(_fractions(formula)))
    for k, match in enumerate(matches):
        text = match[0]
        if match["word"] and _is_prose(match, matches[k + 1 :], bool(prose)):
            prose.append(text)
        elif not text.strip():
            continue
        elif text in ",;:" and not depth:
            end_prose()
            end_formula()
            out[-1] += text
        else:
            end_prose()
            # "τ 1 or 1.05" is no product.
            if tex and match["number"] and not matches[k - 1][0].strip() and matches[k - 2]["word"]:
                tex.append("\\")
            tex.append(_term(match, bars % 2 == 0))
            bars += text == "|"
            depth += (text in "([\x01") - (text in ")]\x03")
    end_prose()
    end_formula()
    return " ".join(out)


def _term(match: re.Match[str], opens: bool) -> str:
    """Return the LaTeX of one token; ``opens`` is whether a bar is the first one of a pair."""
    text = match[0]
    if match["sum"]:
        inside = match["set"] or match["index"]
        return r"\sum" + (f"_{{{_set(inside)}}}" if inside else "")
    if match["mean_entropy"]:
        return r"\langle H \rangle" + (f"_{{{match['of']}}}" if match["of"] else "")
    if match["size"]:
        return rf"\lvert {_signed(text[1:-1])} \rvert"
    if match["part"]:
        return _signed(text)
    if match["word"]:
        return _name(match["word"], match["prime"], match["below"])
    if match["number"]:
        return text if text[0] != "." else f"0{text}"
    if text == "|":
        return r"\lvert" if opens else r"\rvert"
    if text in _SIGNS:
        return _SIGNS[text]
    if text in "+-=()[]/,":
        return text
    raise ValueError(f"{text!r} has no meaning in a formula")


def _fractions(text: str) -> str:
    """Mark ``(1/X)``, a fraction in brackets of its own, by characters that stand for its three borders."""
    inner = r"[^()\s][^()]*?(?:\([^()]*\))?"
    text = re.sub(r"\((1|4)/\(([^()]*)\)\)", "\x01\\1\x02\\2\x03", text)
    return re.sub(rf"\((1|4)/({inner})\)", "\x01\\1\x02\\2\x03", text)


def _is_prose(match: re.Match[str], rest: list[re.Match[str]], within: bool) -> bool:
    word = match["word"]
    if match["below"] or (word in _FUNCTIONS and rest and rest[0][0] in ("(", " ", "_")):
        # "mean over prompts" and "by the sign of A" speak of functions, and apply none.
        return word in ("mean", "sign") and not match["below"] and len(rest) > 1 and len(rest[1]["word"] or "") > 1
    if word in (*_NAMES, "lp"):
        return False
    # One small letter is a symbol, but an article between words.
    if word == "a":
        return within or (len(rest) > 1 and len(rest[1]["word"] or "") > 1)
    return len(word) > 1 and word != "ret"


def _set(text: str) -> str:
    if re.fullmatch(r"A[+-]", text):
        return _signed(text)
    if " " in text:
        return rf"\text{{{text}}}"
    return text.replace("<=", r" \le ")


def _signed(text: str) -> str:
    name = _GREEK.get(text[0])
    letter = rf"\{name}" if name else text[0]
    return f"{letter}^{{{text[1]}}}" if len(text) > 1 else letter


def _name(word: str, prime: str, below: str | None) -> str:
    if word in _GREEK:
        base = rf"\{_GREEK[word]}"
    elif word == "lp":
        base = r"\log \pi"
    elif word in _FUNCTIONS:
        base = rf"\operatorname{{{word}}}"
    elif len(word) > 1:
        base = rf"\mathrm{{{word}}}"
    else:
        base = word
    if not below:
        return base + prime
    index = below if len(below) == 1 or below in _INDICES else rf"\mathrm{{{below}}}"
    return f"{base}{prime}_{{{index}}}"
