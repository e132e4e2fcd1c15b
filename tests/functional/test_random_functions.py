"""Random numbers: distributions against SciPy, and the exact meaning of choices and permutations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

import rlx
from rlx import random
from rlx.errors import GraphError, ShapeError

KEY = random.key(11)
N = 20000
CONTINUOUS: dict[str, tuple[Any, Any]] = {
    "uniform": (lambda k: random.uniform(k, N, minval=-1.0, maxval=3.0), stats.uniform(-1, 4)),
    "normal": (lambda k: random.normal(k, N), stats.norm()),
    "truncated_normal": (lambda k: random.truncated_normal(k, -0.5, 2.0, N), stats.truncnorm(-0.5, 2.0)),
    "tail": (lambda k: random.truncated_normal(k, 2.0, 3.0, N), stats.truncnorm(2.0, 3.0)),
    "exponential": (lambda k: random.exponential(k, N), stats.expon()),
    "gumbel": (lambda k: random.gumbel(k, N), stats.gumbel_r()),
    "laplace": (lambda k: random.laplace(k, N), stats.laplace()),
    "logistic": (lambda k: random.logistic(k, N), stats.logistic()),
    "cauchy": (lambda k: random.cauchy(k, N), stats.cauchy()),
    "gamma": (lambda k: random.gamma(k, 2.5, N), stats.gamma(2.5)),
    "gamma below 1": (lambda k: random.gamma(k, 0.3, N), stats.gamma(0.3)),
    "beta": (lambda k: random.beta(k, 2.0, 0.7, N), stats.beta(2.0, 0.7)),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_samples_have_their_distribution(name: str) -> None:
    draw, distribution = CONTINUOUS[name]
    samples = draw(KEY)
    assert samples.shape == (N,) and samples.dtype == np.float32 and np.isfinite(samples).all()
    assert stats.kstest(samples, distribution.cdf).pvalue > 1e-3
    assert stats.kstest(samples, stats.norm(0.3, 1.7).cdf).pvalue < 1e-3  # the test can fail
    np.testing.assert_array_equal(samples, rlx.jit(draw)(KEY))
    assert not np.array_equal(samples, draw(random.key(12)))


def counts_fit(samples: Any, probabilities: Any) -> bool:
    counts = np.bincount(np.ravel(samples), minlength=len(probabilities))
    expected = np.asarray(probabilities, np.float64) / np.sum(probabilities) * counts.sum()
    return bool(stats.chisquare(counts, expected).pvalue > 1e-3)


def test_discrete_samples_have_their_probabilities() -> None:
    p = np.array([0.1, 0.4, 0.2, 0.3])
    assert counts_fit(random.categorical(KEY, np.log(p), shape=N), p)
    assert not counts_fit(random.categorical(KEY, np.log(p), shape=N), p[::-1])
    assert counts_fit(random.choice(KEY, 4, N, p=p), p)
    assert counts_fit(random.choice(KEY, 4, N, p=p * 7), p)  # they need not add up to 1
    assert counts_fit(random.choice(KEY, 5, N), np.ones(5))
    assert counts_fit(random.randint(KEY, N, 2, 6) - 2, np.ones(4))
    assert counts_fit(random.rademacher(KEY, N) == 1, np.ones(2))
    assert counts_fit(random.bernoulli(KEY, 0.3, N), [0.7, 0.3])
    rows = random.bernoulli(KEY, np.array([0.1, 0.9]), (N, 2))
    np.testing.assert_allclose(rows.mean(0), [0.1, 0.9], atol=0.01)
    assert random.bernoulli(KEY, np.full(5, 0.5)).shape == (5,)  # one number per probability
    assert len(set(random.bernoulli(KEY, np.full(64, 0.5)).tolist())) == 2
    logits = np.log(np.stack([p, p[::-1]]))
    lanes = random.categorical(KEY, logits, shape=(N, 2))
    assert counts_fit(lanes[:, 0], p) and counts_fit(lanes[:, 1], p[::-1])
    across = random.categorical(KEY, np.log(np.tile(p[:, None], (1, N))), axis=0)
    assert across.shape == (N,) and counts_fit(across, p)
    draw = rlx.jit(lambda k, low, high: random.randint(k, (N, 2), low, high))
    bounded = draw(KEY, np.array([0, 5]), np.array([2, 9]))
    assert counts_fit(bounded[:, 0], np.ones(2)) and counts_fit(bounded[:, 1] - 5, np.ones(4))


def test_permutations_are_uniform() -> None:
    keys = random.split(KEY, 6000)
    orders = rlx.jit(rlx.vmap(lambda k: random.permutation(k, 3)))(keys)
    assert (np.sort(orders, 1) == np.arange(3)).all()
    codes = np.unique(orders @ [9, 3, 1], return_inverse=True)[1]
    assert counts_fit(codes, np.ones(6))
    x = np.arange(20.0).reshape(4, 5)
    shuffled = random.permutation(KEY, x, axis=1)
    np.testing.assert_array_equal(shuffled - x[:, :1], (shuffled - x[:, :1])[:1].repeat(4, 0))  # all rows alike
    assert sorted(shuffled[0].tolist()) == x[0].tolist()
    apart = random.permutation(KEY, np.tile(np.arange(50.0), (3, 1)), axis=1, independent=True)
    assert (np.sort(apart, 1) == np.arange(50.0)).all() and not np.array_equal(apart[0], apart[1])


def test_choices_of_rows_and_without_replacement() -> None:
    names = np.array([10.0, 20.0, 30.0, 40.0])
    for p in (None, np.array([0.1, 0.2, 0.3, 0.4])):
        picked = random.choice(KEY, names, (2, 2), replace=False, p=p)
        assert picked.shape == (2, 2) and sorted(picked.ravel().tolist()) == names.tolist()
    first = rlx.jit(rlx.vmap(lambda k: random.choice(k, 4, (1,), replace=False, p=np.array([0.1, 0.2, 0.3, 0.4]))))
    assert counts_fit(first(random.split(KEY, 6000)), [0.1, 0.2, 0.3, 0.4])
    columns = random.choice(KEY, np.arange(6.0).reshape(2, 3), (7,), axis=1)
    assert columns.shape == (2, 7)
    np.testing.assert_array_equal(columns[1] - columns[0], np.full(7, 3.0))
    assert random.choice(KEY, 3).shape == ()


def test_dirichlet_rows_add_up_to_one() -> None:
    alpha = np.array([0.5, 2.0, 1.5])
    rows = random.dirichlet(KEY, alpha, N)
    np.testing.assert_allclose(rows.sum(1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(rows.mean(0), alpha / 4.0, atol=0.01)
    assert stats.kstest(rows[:, 0], stats.beta(0.5, 3.5).cdf).pvalue > 1e-3


def test_a_shape_may_be_a_number_and_numbers_do_not_depend_on_it() -> None:
    np.testing.assert_array_equal(random.normal(KEY, 3), random.normal(KEY, (3,)))
    np.testing.assert_array_equal(random.normal(KEY, np.int64(3)), random.normal(KEY, [3]))
    assert random.uniform(KEY, (2, 3), "f64").dtype == np.float64


def test_names_of_other_libraries_say_what_they_are_called() -> None:
    with pytest.raises(AttributeError, match=r"it is called rlx\.random\.key here"):
        _ = random.PRNGKey
    with pytest.raises(AttributeError, match="did you mean 'normal'"):
        _ = random.norml
    with pytest.raises(GraphError, match="the seed is a traced number") as caught:
        rlx.jit(random.key)(3)
    assert caught.value.hint is not None and "fold_in" in caught.value.hint
    with pytest.raises(ShapeError, match="5 of 4 entries without replacement"):
        random.choice(KEY, 4, (5,), replace=False)
    with pytest.raises(ShapeError, match=r"p is f64\[3\], there are 4 entries"):
        random.choice(KEY, 4, (5,), p=np.ones(3))
    with pytest.raises(ShapeError, match="sizes 2 and 3 do not broadcast"):
        random.bernoulli(KEY, np.full(2, 0.5), (3,))
    with pytest.raises(ShapeError, match=r"shape \[3\] does not end in \[2\]"):
        random.categorical(KEY, np.zeros((2, 4)), shape=(3,))
