"""The formulas of the recipes become LaTeX, that of every page MathML, and a browser shows them."""

from __future__ import annotations

import re

import pytest

from lit_grpo.objectives import RECIPES
from scripts.docs_site import on_page_content
from scripts.formula_tex import to_markdown

NOT_INSTALLED = "the extra docs is not installed"


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("-(1/N) Σ_i (1/n_i) Σ_t lp", r"$- \dfrac{ 1 }{ N } \sum_{i} \dfrac{ 1 }{ n_{i} } \sum_{t} \log \pi$"),
        ("A = (r-μ_g)/(σ_batch+ε)", r"$A = ( r - \mu_{g} ) / ( \sigma_{\mathrm{batch}} + \epsilon )$"),
        ("Σ_{A-} max(ρ, .8), mean over prompts",
         r"$\sum_{A^{-}} \operatorname{max} ( \rho , 0.8 )$, mean over prompts"),
        ("τ 1 or 1.05 by the sign of A", r"$\tau \ 1$ or $1.05$ by the sign of $A$"),
        ("(r - mean of the others)", r"$( r - \text{ mean of the others } )$"),
        ("-<H>_i", r"$- \langle H \rangle_{i}$"),
    ],
)  # fmt: skip
def test_a_formula_in_plain_text_becomes_latex(formula, expected):
    assert to_markdown(formula) == expected


def test_what_has_no_meaning_is_refused():
    with pytest.raises(ValueError, match="'%'"):
        to_markdown("A % B")


def test_no_letter_or_number_of_a_formula_is_lost():
    greek = {
        "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "Δ": "Delta", "ε": "epsilon", "η": "eta",
        "λ": "lambda", "μ": "mu", "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau",
    }  # fmt: skip
    for name, recipe in RECIPES.items():
        plain = re.sub("Σ", " sum ", recipe.formula).replace("lp", "log pi").replace("½", "1 2").replace("²", "2")
        plain = plain.replace("±", "pm").replace("<H>", "langle H rangle").replace("<=", "le")
        # Bars of |A+| and of |A|, and fractions, are words in LaTeX.
        plain = "".join(greek.get(letter, letter) for letter in plain)
        made = re.sub(r"\\(d?t?frac|operatorname|mathrm|text|[lr]vert) ?|[\\${}]", " ", to_markdown(recipe.formula))
        letters = [re.sub(r"[^A-Za-z1-9]", "", text) for text in (plain, made)]
        assert letters[0] == letters[1], name


def test_a_page_shows_mathml():
    pytest.importorskip("latex2mathml", reason=NOT_INSTALLED)
    page = r'<p>a <span class="arithmatex">\(\rho &lt; \operatorname{sg}(x_i)\)</span> b</p>'
    made = on_page_content(page)
    assert made.startswith("<p>a <math ")
    assert made.endswith("</math> b</p>")
    assert "<mi>&#x003C1;</mi><mo>&#x0003C;</mo><mi>sg</mi>" in made
    alone = on_page_content(r'<div class="arithmatex">\[L\]</div>')
    assert 'display="block"' in alone


def test_an_unknown_command_is_no_page():
    pytest.importorskip("latex2mathml", reason=NOT_INSTALLED)
    with pytest.raises(ValueError, match=r"\\nothing is unknown"):
        on_page_content(r'<span class="arithmatex">\(\nothing x\)</span>')
