import pytest

from stillroom.data.words import LANGUAGES, LanguageDetector
from stillroom.errors import InputError

TEXTS = {
    "en": "The price of the lamp is twelve euros.",
    "de": "Der Preis der Lampe beträgt zwölf Euro.",
    "fr": "Le prix de la lampe est de douze euros.",
    "es": "El precio de la lámpara es de doce euros.",
    "it": "Il prezzo della lampada è di dodici euro.",
    "nl": "De prijs van de lamp is twaalf euro.",
    "pl": "Cena lampy wynosi dwanaście euro.",
    "ru": "Цена лампы двенадцать евро.",
    "zh": "灯的价格是十二欧元。",
    "ja": "ランプの値段は十二ユーロです。",
    "ko": "램프의 가격은 12유로입니다.",
    "ar": "سعر المصباح اثنا عشر يورو.",
}


@pytest.mark.parametrize(("code", "text"), TEXTS.items())
def test_a_sentence_is_enough_to_tell_its_language(code: str, text: str) -> None:
    assert LanguageDetector(code).language_of(text) == code
    assert code in LANGUAGES


@pytest.mark.parametrize("text", ["", "12", "4.5 + 7 = 11.5", "```\nprint('hello world')\n```"])
def test_numbers_and_code_have_no_language(text: str) -> None:
    assert LanguageDetector("en").language_of(text) is None


def test_code_in_an_answer_does_not_decide() -> None:
    text = f"{TEXTS['de']}\n```python\n{'print(the_price_of_the_lamp)' * 20}\n```"

    assert LanguageDetector("de").language_of(text) == "de"


def test_an_unknown_code_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InputError, match="'english' is unknown"):
        LanguageDetector("english")
