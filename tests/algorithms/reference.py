"""The formulas again, in plain Python over lists: slow, obvious, and sharing no code with rill.

A sequence is a dict of lists, one entry to a token: logp, old, mu, ref, adv, mask (0 or 1), lag.
A loss gives, for each token, its value and its derivative by that token's logp where every token has weight 1.
"""

import itertools
import math


def trained(seq, name):
    return [v for v, m in zip(seq[name], seq["mask"]) if m]


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def std(values):
    centre = mean(values)
    return math.sqrt(sum((v - centre) ** 2 for v in values) / (len(values) - 1))


# --- advantages -------------------------------------------------------------------------------------------


def grpo(rewards, eps=1e-6):
    if len(rewards) == 1:
        return [rewards[0] / (1 + eps)]
    return [(r - mean(rewards)) / (std(rewards) + eps) for r in rewards]


def dr_grpo(rewards):
    return list(rewards) if len(rewards) == 1 else [r - mean(rewards) for r in rewards]


def rloo(rewards):
    if len(rewards) == 1:
        return list(rewards)
    return [r - mean(o for j, o in enumerate(rewards) if j != i) for i, r in enumerate(rewards)]


def opo(rewards, lengths):
    if len(rewards) == 1:
        return list(rewards)
    baseline = sum(length * r for length, r in zip(lengths, rewards)) / sum(lengths)
    return [r - baseline for r in rewards]


def max_at_k(rewards, k):
    """Over every subset, as the definition says."""
    subsets = list(itertools.combinations(range(len(rewards)), k))
    out = []
    for i in range(len(rewards)):
        total = 0.0
        for subset in subsets:
            if i in subset:
                others = [rewards[j] for j in subset if j != i]
                total += max(rewards[j] for j in subset) - max(others)
        out.append(total / len(subsets))
    return out


def pass_at_k_training(rewards, k):
    """Each k-subset is one 'answer' with the reward of its best; a sample's advantage is the mean standardised
    reward of the subsets it is in (population standard deviation)."""
    subsets = list(itertools.combinations(range(len(rewards)), k))
    scores = [max(rewards[j] for j in subset) for subset in subsets]
    centre = mean(scores)
    deviation = math.sqrt(mean((s - centre) ** 2 for s in scores))
    if deviation == 0:
        return [0.0] * len(rewards)
    return [
        mean(s - centre for s, subset in zip(scores, subsets) if i in subset) / deviation
        for i in range(len(rewards))
    ]


def gae(rewards, values, bootstrap, gamma, lam):
    """Backward recursion over the trained tokens of one sequence."""
    out, running, following = [], 0.0, bootstrap
    for r, v in zip(reversed(rewards), reversed(values)):
        running = r + gamma * following - v + gamma * lam * running
        following = v
        out.append(running)
    return out[::-1]


def reward_to_go(rewards, gamma):
    return [sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]


def whiten(values):
    if len(values) == 1:
        return list(values)
    centre, variance = mean(values), std(values) ** 2
    return [(v - centre) / math.sqrt(variance + 1e-8) for v in values]


# --- losses: per token (value, derivative) ----------------------------------------------------------------


def _clip_term(r, a, low, high, dual):
    """value and derivative by r."""
    bounded = min(max(r, 1 - low), 1 + high)
    if -r * a >= -bounded * a:
        value, slope = -r * a, -a
    else:
        value, slope = -bounded * a, 0.0
    if dual is not None and a < 0 and value > -dual * a:
        value, slope = -dual * a, 0.0
    return value, slope


def clip(seq, low=0.2, high=0.2, dual=None):
    out = []
    for lp, old, a in zip(seq["logp"], seq["old"], seq["adv"]):
        r = math.exp(lp - old)
        value, slope = _clip_term(r, a, low, high, dual)
        out.append((value, slope * r))
    return out


def reinforce(seq):
    return [(-a * lp, -a) for lp, a in zip(seq["logp"], seq["adv"])]


def gspo(seq, low=3e-4, high=4e-4):
    x = [lp - old for lp, old, m in zip(seq["logp"], seq["old"], seq["mask"]) if m]
    s = math.exp(mean(x)) if x else 1.0
    out = []
    for a in seq["adv"]:
        value, slope = _clip_term(s, a, low, high, None)
        out.append((value, slope * s))
    return out


def cispo(seq, low=1.0, high=4.0):
    out = []
    for lp, old, a in zip(seq["logp"], seq["old"], seq["adv"]):
        w = min(max(math.exp(lp - old), 1 - low), 1 + high)
        out.append((-w * a * lp, -w * a))
    return out


def gmpo(seq, low=0.4, high=0.4):
    count = sum(seq["mask"])
    if not count:
        return [(0.0, 0.0)] * len(seq["mask"])
    a = mean(trained(seq, "adv"))
    logs, free = [], []
    for lp, old, m in zip(seq["logp"], seq["old"], seq["mask"]):
        x = lp - old
        c = min(x, high) if a >= 0 else max(x, -low)
        free.append(1.0 if c == x else 0.0)
        if m:
            logs.append(c)
    rho = math.exp(mean(logs))
    return [(-a * rho, -a * rho * f) for f in free]


def sapo(seq, positive=1.0, negative=1.05):
    out = []
    for lp, old, a in zip(seq["logp"], seq["old"], seq["adv"]):
        r, tau = math.exp(lp - old), positive if a > 0 else negative
        sig = 1 / (1 + math.exp(-tau * (r - 1)))
        out.append((-4 / tau * sig * a, -4 * sig * (1 - sig) * r * a))
    return out


def dppo(seq, divergence="tv", low=0.15, high=0.15, max_ratio=20.0):
    out = []
    for lp, old, a in zip(seq["logp"], seq["old"], seq["adv"]):
        p, q = math.exp(lp), math.exp(old)
        if divergence == "tv":
            d = abs(p - q)
        else:
            d = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        outside = d > high and p > q if a > 0 else d > low and p < q
        w = 0.0 if outside else min(math.exp(lp - old), max_ratio)
        out.append((-w * a * lp, -w * a))
    return out


def dro(seq, beta=0.05):
    """−A log π + β/2 (log π − log μ)², and its derivative −A + β (log π − log μ)."""
    return [
        (-a * lp + beta / 2 * (lp - mu) ** 2, -a + beta * (lp - mu))
        for a, lp, mu in zip(seq["adv"], seq["logp"], seq["mu"])
    ]


def aipo(seq, delta=8.0, keep_gradient=False):
    out = []
    for lp, mu, a in zip(seq["logp"], seq["mu"], seq["adv"]):
        r = math.exp(lp - mu)
        w = min(r, delta)
        if keep_gradient:
            out.append((-w * a * lp, -w * a))
        else:
            out.append((-w * a, -r * a if r < delta else 0.0))
    return out


def decoupled(seq, low=0.2, high=0.2, cap=5.0, over="mask", proximal="recompute"):
    out = []
    for lp, old, mu, a, lag in zip(seq["logp"], seq["old"], seq["mu"], seq["adv"], seq["lag"]):
        prox = old if proximal == "recompute" else mu + lag / (lag + 1) * (lp - mu)
        w = math.exp(prox - mu)
        if w > cap:
            w = cap if over == "clamp" else 0.0
        r = math.exp(lp - prox)
        value, slope = _clip_term(r, a, low, high, None)
        out.append((w * value, w * slope * r))
    return out


def covariances(seqs):
    old = [v for s in seqs for v in trained(s, "old")]
    adv = [v for s in seqs for v in trained(s, "adv")]
    return [
        [(o - mean(old)) * (a - mean(adv)) if m else None for o, a, m in zip(s["old"], s["adv"], s["mask"])]
        for s in seqs
    ]


# --- aggregation, corrections, KL -------------------------------------------------------------------------


def aggregate(seqs, terms, mode, constant=1.0, weights=None, keep=None):
    """(loss, gradient per sequence and token) of per-token (value, derivative) terms, over the whole batch."""
    weights = weights or [[1.0] * len(s["mask"]) for s in seqs]
    masks = (
        [[m * k for m, k in zip(s["mask"], row)] for s, row in zip(seqs, keep)]
        if keep
        else [s["mask"] for s in seqs]
    )
    counted = [i for i, mask in enumerate(masks) if sum(mask)]
    total = {
        "token-mean": max(sum(sum(mask) for mask in masks), 1),
        "token-sum": 1,
    }.get(mode, max(len(counted), 1))
    loss, gradient = 0.0, []
    for term, mask, weight in zip(terms, masks, weights):
        scale = {
            "seq-mean-token-mean": 1 / max(sum(mask), 1),
            "seq-mean-token-sum-norm": 1 / constant,
        }.get(mode, 1.0) / total
        loss += sum(scale * w * m * v for (v, _), m, w in zip(term, mask, weight))
        gradient.append([scale * w * m * g for (_, g), m, w in zip(term, mask, weight)])
    return loss, gradient


def token_ratio(seq):
    return [math.exp(old - mu) for old, mu in zip(seq["old"], seq["mu"])]


def sequence_ratio(seq):
    return math.exp(sum(old - mu for old, mu, m in zip(seq["old"], seq["mu"], seq["mask"]) if m))


def tis(seq, high, level):
    ratios = token_ratio(seq) if level == "token" else [sequence_ratio(seq)] * len(seq["mask"])
    return [min(w, high) for w in ratios]


def mis(seq, low, high, level):
    ratios = token_ratio(seq) if level == "token" else [sequence_ratio(seq)] * len(seq["mask"])
    return [w if low <= w <= high else 0.0 for w in ratios]


def divergence(seq, estimator, reduction):
    x = [old - mu for old, mu, m in zip(seq["old"], seq["mu"], seq["mask"]) if m]
    if not x:
        return 0.0
    k = {"k1": lambda v: v, "k2": lambda v: v * v / 2, "k3": lambda v: math.exp(v) - 1 - v, "abs": abs}[
        estimator
    ]
    return {"sum": sum, "mean": mean, "max": max}[reduction]([k(v) for v in x])


def kl(lp, ref, estimator):
    """value and derivative by lp."""
    x = lp - ref
    if estimator == "k1":
        return x, 1.0
    if estimator == "k2":
        return x * x / 2, x
    if estimator == "k3":
        return math.exp(-x) - 1 + x, 1 - math.exp(-x)
    if estimator == "abs":
        return abs(x), math.copysign(1.0, x) if x else 0.0
    if estimator == "k1+":
        return x, x
    return math.exp(-x) - 1 + x, x  # k3+


def value_loss(v, old, ret, clip):
    """value and derivative by v of ½ max(plain, clipped)."""
    plain = (v - ret) ** 2
    bounded = old + min(max(v - old, -clip), clip)
    clipped = (bounded - ret) ** 2
    if plain >= clipped:
        return plain / 2, v - ret
    return clipped / 2, (bounded - ret) if abs(v - old) < clip else 0.0
