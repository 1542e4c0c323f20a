"""The audit's attacks: what a server's host can make of the traffic that it saw.

    tokens       the first layer's input is a function of the token: look each row up in the public embedding
    unmask       a server that drew the masks itself (weak) takes them off again, then the same
    projection   take away the few directions in which most of the traffic lies, as masks do that are used again
    repetition   the mean of many maskings of one row, then the same
    adapter      least squares of a LoRA on up_proj from the inputs of two consecutive layers
    weights      what a client learns of the server's weights, by rows of its choice
    lengths      how many tokens each sequence has, from the sizes of messages

One rule: an attack gets what the host has, and no more: what travelled, the base's weights, and public text for
word frequencies; truth is used only to count. Each is written to win: with plain traffic it does, or it would
prove nothing where it fails. Findings stand beside what the same attack finds in noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from symbiosis.privacy.draws import DOUBLE, RING, SINGLE, Grid, draw, fresh_seed
from symbiosis.privacy.exact import WHOLE_BITS, in_whole_numbers
from symbiosis.privacy.gaussian import draw_normal
from symbiosis.privacy.scale import Scale
from symbiosis.privacy.traffic import Exchange
from symbiosis.tables import html_table

CONFIDENCE = 2.576  # standard normal quantile of 99.5%: 1% on both sides together
ROWS_AT_ONCE = 128
COLUMNS = 8  # of an adapter's update that are regressed


@dataclass(frozen=True)
class Finding:
    """How far one attack got in one setting.

    Attributes:
        success: a share of tokens or sequences, or a cosine.
        chance: what the same attack gets of noise.
        tries: how many tokens, sequences or elements it is of.
    """

    setting: str
    attack: str
    success: float
    chance: float
    tries: int

    @property
    def margin(self) -> float:
        """How far above chance a success may be by luck, in 1% of audits."""
        spread = 1.0 if self.attack in ("adapter", "weights") else self.chance * (1 - self.chance)
        return CONFIDENCE * math.sqrt(max(spread, 1 / self.tries) / self.tries)

    @property
    def at_chance(self) -> bool:
        return self.success <= self.chance + self.margin


@dataclass(frozen=True)
class Report:
    """Findings as a table."""

    findings: tuple[Finding, ...]

    def of(self, setting: str, attack: str) -> Finding:
        return next(f for f in self.findings if (f.setting, f.attack) == (setting, attack))

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        return [
            (f.setting, f.attack, f"{f.success:.4f}", f"{f.chance:.4f}", "at chance" if f.at_chance else "broken")
            for f in self.findings
        ]

    def __str__(self) -> str:
        head = ("setting", "attack", "success", "chance", "verdict")
        return "\n".join(f"{a:<22}{b:<20}{c:>9}{d:>9}  {e}" for a, b, c, d, e in [head, *self.rows()])

    def _repr_html_(self) -> str:
        return html_table(self.rows(), head=("setting", "attack", "success", "chance", "verdict"))


class Candidates:
    """What the first layer's input is for each token, and how often tokens are met.

    Args:
        rows: [V, d].
        text: token ids of public text, for the prior.
    """

    def __init__(self, rows: torch.Tensor, text: torch.Tensor) -> None:
        self.rows = rows.float()
        self._half_squares = self.rows.square().sum(1) / 2
        self._text = text
        counts = torch.bincount(text.flatten(), minlength=len(rows)).float() + 0.1
        self._prior = (counts / counts.sum()).log()

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Candidates:
        """The same, after what was done to the rows that were sent: [V, d] to [V, d]."""
        return Candidates(change(self.rows), self._text)

    def clipped(self, norm: float) -> Candidates:
        """The same, as they are sent where rows are clipped to a norm."""
        return self.changed(lambda rows: rows * (norm / rows.norm(dim=1, keepdim=True).clamp_min(norm)))

    def identify(self, seen: torch.Tensor, sigma: float) -> torch.Tensor:
        """The likeliest token of each row [N, d] of a token's row plus noise of deviation sigma: [N]."""
        found = []
        for part in seen.split(ROWS_AT_ONCE):
            products = part.float() @ self.rows.t()  # [n, d] @ [d, V]
            found.append(((products - self._half_squares) / sigma**2 + self._prior).argmax(1))
        return torch.cat(found)


def identify_tokens(
    setting: str, seen: torch.Tensor, truth: torch.Tensor, candidates: Candidates, attack: str = "tokens"
) -> Finding:
    """Look rows [N, d] up; chance is the same attack on noise of the same size."""
    size = seen.double().std().item()
    noise = size * torch.randn(seen.shape, generator=torch.Generator().manual_seed(1))
    tried = ((seen, _noise_of(seen, candidates)), (noise, size))
    hits = [(candidates.identify(rows, sigma) == truth).float().mean().item() for rows, sigma in tried]
    return Finding(setting, attack, hits[0], hits[1], len(truth))


def _noise_of(seen: torch.Tensor, candidates: Candidates) -> float:
    """How much larger rows are than candidates, taken for noise; little if they are not."""
    excess = seen.double().square().mean().item() - candidates.rows.double().square().mean().item()
    return math.sqrt(max(excess, 1e-4 * candidates.rows.double().square().mean().item()))


def sent_to(exchanges: Iterable[Exchange], module: str, op: str = "forward") -> torch.Tensor:
    """All rows that were sent to a module, in order: [N, d]; integers as if a row's largest were 1."""
    sent = torch.cat([e.tensors[0] for e in exchanges if e.op == op and module in e.modules and e.tensors])
    return sent if sent.is_floating_point() else sent.double() * 2.0**-WHOLE_BITS


def unmasked(exchanges: Sequence[Exchange], module: str) -> torch.Tensor:
    """Rows with the masks taken off that this server drew itself: [N, d]. Without such draws, rows as they are."""
    sent = sent_to(exchanges, module)
    draws = [e for e in exchanges if e.op == "forward" and module in e.modules and e.request.seed is not None]
    if not draws:
        return sent
    masks = torch.cat([_drawn(e, DOUBLE if sent.dtype == torch.float64 else SINGLE) for e in draws])
    along = functional.normalize(sent.double()) @ functional.normalize(masks.double()).t()  # [N, M]
    mask = masks[along.argmax(1)].double()
    # The step is a power of two: the one by which the mask fits best.
    step = torch.exp2(torch.log2((sent * mask).sum(1) / mask.square().sum(1)).round())
    return sent - step[:, None] * mask


def _drawn(exchange: Exchange, grid: Grid) -> torch.Tensor:
    assert exchange.request.seed is not None
    rows, width = exchange.request.tensors[0].shape
    return draw(exchange.request.seed, rows, width, grid)


def project_out(
    setting: str, seen: torch.Tensor, truth: torch.Tensor, candidates: Candidates, directions: int
) -> Finding:
    """Look rows [N, d] up without the directions that hold most of them; so for candidates, too."""
    _, _, basis = torch.linalg.svd(seen.double(), full_matrices=False)
    away = basis[:directions]  # [k, d], orthonormal

    def rest(rows: torch.Tensor) -> torch.Tensor:
        kept: torch.Tensor = rows.double() - (rows.double() @ away.t()) @ away
        return kept

    return identify_tokens(setting, rest(seen), truth, candidates.changed(rest), "projection")


def reused(seen: torch.Tensor, masks: int, strength: float) -> torch.Tensor:
    """Rows [N, d] as they would be sent under a pool of so many masks, each used again and again."""
    pool = draw(fresh_seed(), masks, seen.shape[1], DOUBLE)
    size = strength * seen.double().norm(dim=1).max() / DOUBLE.sigma
    chosen = torch.randint(masks, (len(seen),), generator=torch.Generator().manual_seed(3))
    under: torch.Tensor = seen.double() + size * pool[chosen]
    return under


def extract_weights(call: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor) -> Finding:
    """How much of a weight [d_out, d_in] a client has after d_in rows: the cosine; one column for each row."""
    with torch.no_grad():
        found = call(torch.eye(weight.shape[1])).t()  # [d_out, d_in]
    cosine = functional.cosine_similarity(found.flatten().double(), weight.detach().flatten().double(), dim=0)
    return Finding("client", "weights", cosine.item(), 0.0, weight.numel())


def repetition(
    setting: str, candidates: Candidates, tokens: torch.Tensor, times: int, grid: Grid, strength: float
) -> Finding:
    """Send the row of each token many times, under fresh masks, with no memory and no budget; then look the mean up."""
    rows = candidates.rows.double()
    scale = Scale(grid, strength)
    scale.steps(rows.norm(dim=1))
    step = scale.steps(rows[tokens].norm(dim=1))
    means = []
    for token, of_row in zip(tokens.tolist(), step.tolist(), strict=True):
        whole = (rows[token] / of_row).round()
        means.append((whole + draw(fresh_seed(), times, len(whole), grid).double().mean(0)) * of_row)
    return identify_tokens(setting, torch.stack(means), tokens, candidates, f"repetition x{times:,}")


def repetition_of_noise(
    setting: str, candidates: Candidates, tokens: torch.Tensor, times: int, sigma: float
) -> Finding:
    """The same for noise that stays; candidates are clipped already."""
    rows = candidates.rows[tokens].double()
    means = rows + sigma / math.sqrt(times) * draw_normal(*rows.shape)  # as the mean of so many draws
    return identify_tokens(setting, means, tokens, candidates, f"repetition x{times:,}")


def repetition_in_integers(setting: str, candidates: Candidates, tokens: torch.Tensor, times: int) -> Finding:
    """The same for masks that are uniform modulo 2^64."""
    rows, _ = in_whole_numbers(candidates.rows[tokens].double())
    sums = [(row + draw(fresh_seed(), times, len(row), RING)).double().mean(0) * 2.0**-WHOLE_BITS for row in rows]
    return identify_tokens(setting, torch.stack(sums), tokens, candidates, f"repetition x{times:,}")


def regress_adapter(
    setting: str,
    inputs: torch.Tensor,
    outputs: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    update: torch.Tensor,
) -> Finding:
    """Cosine of a LoRA's update of up_proj with what least squares finds of the inputs of gate_proj and down_proj.

    Args:
        inputs: rows that went to gate_proj and up_proj, [N, d].
        outputs: rows that went to down_proj, [N, f]: silu(x gateᵀ) * (x (up + update)ᵀ).
        gate, up: the base's weights, [f, d].
        update: the truth, [f, d]; its largest rows are looked for.
    """
    columns = update.norm(dim=1).topk(COLUMNS).indices
    x, z = inputs.double(), outputs.double()[:, columns]
    slope = functional.silu(x @ gate[columns].double().t())  # [N, COLUMNS]
    rest = z - slope * (x @ up[columns].double().t())
    ridge = 1e-9 * x.square().mean() * len(x) * torch.eye(x.shape[1], dtype=torch.float64)
    found = []
    for weight, target in zip(slope.t(), rest.t(), strict=True):
        weighted = x * weight[:, None]
        scale = weighted.square().mean().clamp_min(1e-300) / x.square().mean()
        found.append(torch.linalg.solve(weighted.t() @ weighted + ridge * scale, weighted.t() @ target))
    cosine = functional.cosine_similarity(torch.stack(found).flatten(), update[columns].double().flatten(), dim=0)
    return Finding(setting, "adapter", abs(cosine.item()), 0.0, COLUMNS * x.shape[1])


def infer_lengths(setting: str, exchanges: Sequence[Exchange], module: str, truth: Sequence[int]) -> Finding:
    """How many sequences' lengths are the numbers of rows sent; no setting hides them."""
    calls = [e for e in exchanges if e.op == "forward" and module in e.modules and e.tensors]
    sizes = [rows for e in calls if (rows := e.request.tensors[0].shape[0])]  # without rows: asked for exponents
    hits = sum(size == length for size, length in zip(sizes, truth, strict=False))
    return Finding(setting, "lengths", hits / len(truth), 0.0, len(truth))


def first_layer_rows(model: Any) -> torch.Tensor:
    """What the first layer's linears get for each token, [V, d], of a Llama-like model without learnt positions."""
    inner = model.get_decoder() if hasattr(model, "get_decoder") else model.model
    with torch.no_grad():
        rows: torch.Tensor = inner.layers[0].input_layernorm(inner.embed_tokens.weight)
    return rows.detach()
