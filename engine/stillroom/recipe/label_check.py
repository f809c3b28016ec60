"""Finds labels that are probably wrong, by predicting each from the texts of other folds.

The classifier is ridge regression on hashed words, word pairs and character n-grams: it is solved
exactly, so the result depends on the seed only, and single wrong labels sway a squared error less
than a likelihood.
Copies of a text are in one fold. A teacher gives copies the same label, so a copy would confirm a
mistake. Texts that are only similar are spread over the folds: they are the best evidence, and
their errors are rarely the same.
Dimensions: N texts, D features, L labels.
Source of the idea: Northcutt, Jiang and Chuang, Confident Learning (2021).
"""

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.data.words import words_of

_Floats = NDArray[np.floating[Any]]
_Ints = NDArray[np.int64]
_Bools = NDArray[np.bool_]

_NUM_FEATURES = 512
_NGRAM_LENGTH = 4
"""The characters of an n-gram; a mark at each end of the word counts as one."""
_RIDGE = 1.0
_MIN_MARGIN = 0.3
"""How far the score of the likely label must be above that of the given one; most scores
are 0 to 1.
Right labels that are hard to predict have small margins, whatever their confidence is."""
_MIN_CONFIDENCE = 0.6
_MIN_KAPPA = 0.3
"""How well a label must be predictable for its predictions to count. The kappa of a label that does
not depend on the words of its texts is 0 ± 0.1 for 100 texts."""
_SHARPNESSES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30)


@dataclass(frozen=True, slots=True)
class Doubt:
    """A text whose label is probably wrong."""

    index: int
    """The number of the text, from 0."""
    label: str
    """The given label."""
    likely: str
    """The label that the other texts suggest."""
    confidence: float
    """The probability of the likely label, estimated from the other texts."""


def doubtful_labels(
    texts: Sequence[str], labels: Sequence[str], *, num_folds: int = 5, seed: int = 0
) -> list[Doubt]:
    """Returns the texts whose labels are probably wrong, the most confident first.

    Labels must be a closed set, such as queues or topics. A label that fewer than `num_folds` texts
    have, or that the words of the texts do not predict, is never doubted and never suggested: there
    is no evidence. So the list is empty if labels depend on something else, such as arithmetic.
    Doubts about labels that the words predict only roughly are more often wrong.
    """
    counts = Counter(labels)
    names = sorted(label for label, count in counts.items() if count >= num_folds)
    if len(names) < 2:
        return []
    rows = [row for row, label in enumerate(labels) if counts[label] >= num_folds]
    words = [tuple(words_of(texts[row])) for row in rows]
    label_numbers = {name: number for number, name in enumerate(names)}
    labels_N = np.array([label_numbers[labels[row]] for row in rows])
    features_ND = _features(words)
    folds_N = _folds(words, labels_N, num_folds, Random(seed))

    is_trusted_N = np.ones(len(rows), dtype=bool)
    scores_NL = _cross_fit(features_ND, labels_N, folds_N, is_trusted_N)
    is_predictable_L = _kappas(scores_NL, labels_N) >= _MIN_KAPPA
    # Fitted again without the doubtful texts, the classifier contradicts wrong labels more clearly.
    # Predictability is measured before that: without contradicting texts, any label is predictable.
    is_trusted_N = ~_is_doubtful(scores_NL, labels_N, is_trusted_N, is_predictable_L)
    scores_NL = _cross_fit(features_ND, labels_N, folds_N, is_trusted_N)
    is_doubtful_N = _is_doubtful(scores_NL, labels_N, is_trusted_N, is_predictable_L)

    likely_N = _likely(scores_NL, labels_N)
    confidence_N = _confidence(scores_NL, labels_N, is_trusted_N)
    doubts = [
        Doubt(
            rows[i],
            names[int(labels_N[i])],
            names[int(likely_N[i])],
            round(float(confidence_N[i]), 3),
        )
        for i in map(int, np.flatnonzero(is_doubtful_N))
    ]
    return sorted(doubts, key=lambda doubt: (-doubt.confidence, doubt.index))


def _features(words: Sequence[tuple[str, ...]]) -> _Floats:
    """Returns the features of texts [N, D]; the length of a row is 1, or 0 without shared words."""
    features = [sorted(set(_features_of(text))) for text in words]
    num_texts_with = Counter(feature for text in features for feature in text)
    # A feature of a single text says nothing about others.
    hashed = {
        feature: (zlib.crc32(feature.encode()), np.log(1 + len(words) / count))
        for feature, count in num_texts_with.items()
        if count > 1
    }
    features_ND = np.zeros((len(words), _NUM_FEATURES))
    for row, text in enumerate(features):
        for feature in text:
            if feature in hashed:
                crc, weight = hashed[feature]
                sign = 1 if crc >> 31 else -1
                features_ND[row, crc % _NUM_FEATURES] += sign * weight
    lengths_N = np.linalg.norm(features_ND, axis=1, keepdims=True)
    return features_ND / np.maximum(lengths_N, 1e-9)


def _features_of(words: Sequence[str]) -> Iterator[str]:
    masked = ["#" if any(map(str.isdigit, word)) else word for word in words]
    yield from masked
    for pair in pairwise(masked):
        yield " ".join(pair)
    for word in masked:
        marked = f"<{word}>"
        for start in range(len(marked) - _NGRAM_LENGTH + 1):
            yield f"…{marked[start : start + _NGRAM_LENGTH]}"


def _folds(words: Sequence[tuple[str, ...]], labels_N: _Ints, num_folds: int, rng: Random) -> _Ints:
    """Returns the fold of each text: copies share one, and the labels are spread evenly."""
    copies = defaultdict[tuple[str, ...], list[int]](list)
    for row, text in enumerate(words):
        copies[text].append(row)
    groups = list(copies.values())
    rng.shuffle(groups)
    groups.sort(key=lambda group: int(labels_N[group[0]]))
    folds_N = np.zeros(len(words), dtype=np.int64)
    for position, group in enumerate(groups):
        folds_N[group] = position % num_folds
    return folds_N


def _cross_fit(
    features_ND: _Floats, labels_N: _Ints, folds_N: _Ints, is_trusted_N: _Bools
) -> _Floats:
    """Returns the scores of all labels [N, L] for each text, from the trusted texts of other folds.

    The scores of a text sum to 1; each is about the label's probability.
    """
    targets_NL = np.eye(labels_N.max() + 1)[labels_N]
    scores_NL = np.zeros_like(targets_NL)
    for fold in np.unique(folds_N):
        is_held_out_N = folds_N == fold
        is_training_N = ~is_held_out_N & is_trusted_N
        if is_training_N.any():
            mean_L = targets_NL[is_training_N].mean(axis=0)
            weights_DL = _ridge(features_ND[is_training_N], targets_NL[is_training_N] - mean_L)
            scores_NL[is_held_out_N] = features_ND[is_held_out_N] @ weights_DL + mean_L
    return scores_NL


def _ridge(features_ND: _Floats, targets_NL: _Floats) -> _Floats:
    """Returns the weights [D, L] of ridge regression, from the smaller of two equivalent
    systems."""
    num_texts, num_features = features_ND.shape
    if num_texts < num_features:
        products_NN = features_ND @ features_ND.T + _RIDGE * np.eye(num_texts)
        return features_ND.T @ np.linalg.solve(products_NN, targets_NL)
    products_DD = features_ND.T @ features_ND + _RIDGE * np.eye(num_features)
    return np.linalg.solve(products_DD, features_ND.T @ targets_NL)


def _kappas(scores_NL: _Floats, labels_N: _Ints) -> _Floats:
    """Returns Cohen's kappa between having a label and being predicted to have it [L]."""
    numbers_L = np.arange(scores_NL.shape[1])
    is_given_NL = labels_N[:, None] == numbers_L
    is_predicted_NL = scores_NL.argmax(axis=1)[:, None] == numbers_L
    agreement_L = (is_given_NL == is_predicted_NL).mean(axis=0)
    given_L, predicted_L = is_given_NL.mean(axis=0), is_predicted_NL.mean(axis=0)
    chance_L = given_L * predicted_L + (1 - given_L) * (1 - predicted_L)
    return (agreement_L - chance_L) / np.maximum(1 - chance_L, 1e-9)


def _is_doubtful(
    scores_NL: _Floats, labels_N: _Ints, is_trusted_N: _Bools, is_predictable_L: _Bools
) -> _Bools:
    rows_N, likely_N = np.arange(len(labels_N)), _likely(scores_NL, labels_N)
    margin_N = scores_NL[rows_N, likely_N] - scores_NL[rows_N, labels_N]
    confidence_N = _confidence(scores_NL, labels_N, is_trusted_N)
    is_clear_N = (margin_N >= _MIN_MARGIN) & (confidence_N >= _MIN_CONFIDENCE)
    return is_clear_N & is_predictable_L[likely_N] & is_predictable_L[labels_N]


def _likely(scores_NL: _Floats, labels_N: _Ints) -> _Ints:
    """Returns the best label of each text other than the given one."""
    others_NL = scores_NL.copy()
    others_NL[np.arange(len(labels_N)), labels_N] = -np.inf
    return others_NL.argmax(axis=1)


def _confidence(scores_NL: _Floats, labels_N: _Ints, is_trusted_N: _Bools) -> _Floats:
    """Returns the probability of the likely label of each text [N].

    It is the softmax of the scores, with the sharpness that makes the labels of the trusted texts
    most likely.
    """
    rows_N = np.arange(len(labels_N))
    candidates = [_softmax(sharpness * scores_NL) for sharpness in _SHARPNESSES]

    def log_likelihood(p_NL: _Floats) -> float:
        return float(np.log(p_NL[rows_N, labels_N] + 1e-9)[is_trusted_N].sum())

    return max(candidates, key=log_likelihood)[rows_N, _likely(scores_NL, labels_N)]


def _softmax(scores_NL: _Floats) -> _Floats:
    powers_NL = np.exp(scores_NL - scores_NL.max(axis=1, keepdims=True))
    return powers_NL / powers_NL.sum(axis=1, keepdims=True)
