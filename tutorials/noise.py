# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What noise can and cannot hide
#
# A client sends rows of activations to a server that it does not trust. Adding random numbers to them sounds like protection. How much is
# it? In small steps, with an attacker who is given every advantage; each step is a few lines of numpy or torch, and takes seconds.

# %%
import numpy as np
from IPython.display import HTML

from symbiosis.notebook.charts import line_chart

rng = np.random.default_rng(0)
n_words, d = 1000, 64
words = rng.normal(size=(n_words, d))  # a row for each word of a language
words /= np.linalg.norm(words, axis=1, keepdims=True)  # of norm 1


def guess(seen):
    """The word whose row is nearest, which is the best there is: [N, d] -> [N]."""
    return (seen @ words.T - (words**2).sum(1) / 2).argmax(1)


def plot(points, words_of_it):
    return HTML(
        f"<p>{words_of_it}</p>{line_chart([list(points)], words_of_it, floor=0.0)}"
    )


# %% [markdown]
# ## 1. A little noise hides nothing
#
# The attacker knows the rows of all words; the first layer of a model is public. He sees one row with noise of standard deviation `sigma` on each
# of its 64 numbers, and says which word it was.

# %%
truth = rng.integers(0, n_words, 400)
curve = []
for sigma in (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0):
    seen = words[truth] + sigma * rng.normal(size=(400, d))
    noise_norm, hits = sigma * d**0.5, (guess(seen) == truth).mean()
    curve.append((np.log10(sigma), hits))
    print(
        f"sigma {sigma:5.2f}: noise is {noise_norm:5.1f} times the row, {hits:4.0%} read"
    )
plot(curve, "share of words read, over the logarithm of sigma")

# %% [markdown]
# At sigma 0.1 the noise is almost as long as the row itself, and every word is read: in 64 dimensions, noise rarely points
# towards a wrong word. What counts is not the noise's length but its size *along* the line between two words, and that is sigma.
#
# ## 2. Repetition averages it away
#
# The same word comes again, and with it the same row, under fresh noise. The mean of k copies has noise of `sigma / sqrt(k)`. So sigma 3, which
# hid everything above, lasts for a while, and no longer.

# %%
sigma, curve = 3.0, []
few = truth[:50]
for k in (1, 10, 100, 300, 1000, 3000):
    mean = np.stack(
        [
            words[w] + sigma * rng.normal(size=(k, d)).mean(0, dtype=np.float64)
            for w in few
        ]
    )
    hits = (guess(mean) == few).mean()
    curve.append((np.log10(k), hits))
    print(f"{k:5} times, sigma / sqrt(k) = {sigma / k**0.5:5.2f}: {hits:4.0%} read")
plot(curve, "share of words read, over the logarithm of the number of copies")

# %% [markdown]
# So the question is never "how much noise" but "how much noise, how often". Three ways out: count, and stop at a budget; do not send the same
# row again (remember the answer); or noise of which no amount tells anything (step 6).
#
# ## 3. Norms show through
#
# Real rows differ in length, and some models have a few that are a hundred times longer. Scale the noise to each row, and every row is hidden
# equally well, but its length is on display: the noise's size *is* the length.

# %%
lengths = np.exp(rng.normal(size=8))
rows = words[:8] * lengths[:, None]
scaled = rows + 10 * lengths[:, None] * rng.normal(size=rows.shape)
estimate = np.linalg.norm(scaled, axis=1) / np.sqrt(1 + 100 * d)
for true, read in zip(lengths, estimate):
    print(f"length {true:5.2f}, read as {read:5.2f}")

# %% [markdown]
# With one scale for all, lengths are hidden, but for the rows that stick out; those must be clipped, or their length must be admitted to.
# `Masking` has one scale per layer, fixed at the start, and steps of powers of two for outliers; it counts them (`conn.privacy.stats()`).
#
# ## 4. What epsilon says of a row
#
# Clip each row to norm C. Then any two are at most 2 C apart, and whoever must tell which of two was sent has one number to go by: the
# noise along the line between them. The ratio `mu = 2 C / sigma` decides how well he can do, and (epsilon, delta) is another way to write it:
# the odds change by more than a factor of exp(epsilon) only with a probability of delta.

# %%
from symbiosis.privacy.gaussian import epsilon_of, mu_of

C, delta = 1.0, 1e-5
print("epsilon   sigma   two words told apart")
for epsilon in (0.5, 1.0, 4.0, 16.0, 64.0):
    sigma = 2 * C / mu_of(epsilon, delta)
    a, b = words[0], -words[0]  # as far from each other as can be
    seen = np.where(rng.random(4000)[:, None] < 0.5, a, b)
    is_a = seen[:, 0] == a[0]
    said_a = (seen + sigma * rng.normal(size=seen.shape)) @ (a - b) > 0
    print(f"{epsilon:7.1f} {sigma:7.2f} {(said_a == is_a).mean():12.0%}")

# %% [markdown]
# Half is guessing. Epsilons add up as well: for k releases of rows that depend on one secret, `mu` grows with `sqrt(k)`. A token passes
# through 30 layers, 4 times each, forward and back:

# %%
mu = mu_of(1.0, delta)
for k in (1, 10, 240, 2400):
    print(f"{k:5} rows: epsilon {epsilon_of(mu * k**0.5, delta):7.1f}")

# %% [markdown]
# ## 5. What stays on must be computed with
#
# Noise that the client cannot take off goes through the layer with the row. A product has noise of `sigma` times the norm of the weights'
# rows, whatever is done:

# %%
import torch

W = torch.from_numpy(rng.normal(size=(32, d)) / d**0.5)
x = torch.from_numpy(words[truth])
for epsilon in (1.0, 16.0, 256.0, 4096.0):
    sigma = 2 * C / mu_of(epsilon, delta)
    y = (x + sigma * torch.randn(x.shape, dtype=x.dtype)) @ W.T  # [N, d] @ [d, 32]
    error = (y - x @ W.T).norm() / (x @ W.T).norm()
    print(f"epsilon {epsilon:6.0f}: the error is {error:6.2f} times the result")

# %% [markdown]
# That is the choice of `ActivationNoise`: what is private is of little use, and the other way round. DP-SGD has it better, since it adds
# noise once to a sum over a whole batch, not to every row; but it protects the finished adapter, and not the traffic.
#
# ## 6. Noise that can be taken off
#
# A mask is noise that the client *can* take off, because a second party, which never sees a row, has computed what the layer makes of it. Then it
# may be as large as the arithmetic bears, at no cost in accuracy:

# %%
mask = 256 * torch.randn(x.shape, dtype=x.dtype)
effect = mask @ W.T  # by the second party, from a seed
y = (x + mask) @ W.T - effect
error = (y - x @ W.T).norm() / (x @ W.T).norm()
print(f"the error is {error:.0e} times the result")
print(f"epsilon of one row: {epsilon_of(2 / 256, delta):.4f}")
print(
    f"of one row, sent 100,000 times: {epsilon_of(2 / 256 * 100_000**0.5, delta):.1f}"
)

# %% [markdown]
# It is a large number, not an infinite one: steps 2 and 4 still hold, only later. In single precision, where a mask can be no more than a
# few times the row, "later" is soon.
#
# ## 7. Why exact masks differ
#
# Count in whole numbers that wrap around, as a clock does: modulo 2^16 here. A mask that is uniform over *all* of them turns every row into every
# other with the same probability. There is no "near" any more, so there is nothing to average.

# %%
MODULUS = 1 << 16
x_whole = np.round(words[few] * 100).astype(np.int64)  # two decimals; [50, d]
W_whole = np.round(W.numpy() * 100).astype(np.int64)  # [32, d]

mask = rng.integers(0, MODULUS, x_whole.shape)
sent = (x_whole + mask) % MODULUS
reply = sent @ W_whole.T % MODULUS  # [50, d] @ [d, 32]
y = (reply - mask @ W_whole.T) % MODULUS
y = (y + MODULUS // 2) % MODULUS - MODULUS // 2  # back to signs
assert np.array_equal(y, x_whole @ W_whole.T)

# %% [markdown]
# The result is exact, as long as it fits. And a row that is sent three thousand times:

# %%
curve = []
for k in (1, 100, 3000):
    mean = np.stack(
        [
            ((row + rng.integers(0, MODULUS, (k, d))) % MODULUS).mean(0)
            for row in x_whole
        ]
    )
    hits = (guess((mean - MODULUS / 2) / 100) == few).mean()
    print(f"{k:5} times: {hits:4.0%} read; a blind guess has {1 / n_words:.1%}")

# %% [markdown]
# What is paid is rounding, which is stated beforehand and the same for all, and slower products of whole numbers.
#
# ## In short
#
# | | hides a row | when it comes again | result | needs |
# |---|---|---|---|---|
# | noise that stays | as epsilon says | epsilon grows with each sending | blurred | nothing |
# | real-valued masks | by a large, finite number | the number shrinks: a budget, a memory | as without | a second party |
# | masks modulo 2^k | perfectly | the same | rounded once | a second party, whole numbers |
#
# And none of them hides how many rows there are, when they come, and for which layer. What ours do, and which attacks were tried:
# `docs/security.md`; to watch a server read: notebook 03.
